"""The memory peak of a step of our own runtime: the largest of the phases in which a rank may be fullest.

    forward    head          kept tensors of all micro-batches in flight, logits, the head's gradient
               last block    the block's own peak beside what the others keep
    backward   head          the head's gradient is there twice
               last block    most activations; with earlier gradients or without, buckets launched or not
               early blocks  little is kept any more, and all gradients of the stage are there
               end           the embedding's gradient, and the last buckets in flight
    I, W       split backwards: what W needs is there beside what was kept
    after it   reduction and update, where ZeRO-1 and 2 gather what others updated

Each is added up for every snapshot of the rank's schedule (snapshots.py), by phase_sums.py. What a block
keeps and holds at its peaks stands in block_table.json, which the trace wrote (block_table.py,
block_bytes.py). Not covered: `regather`, etp, ep_overlap, fp32 compute, adapters, dropout; formula.py
estimates these. margins.py says how exact each kind is.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from meshwright.plan.framework import Framework
from meshwright.plan.memory.block_bytes import Items
from meshwright.plan.memory.block_columns import Mask
from meshwright.plan.memory.phase_sums import BackwardSums, EndSums, ForwardSums, SplitSums
from meshwright.plan.memory.rows import EARLY_BLOCKS, Rank, Rows, Step
from meshwright.plan.memory.snapshots import Snapshots, snapshots
from meshwright.plan.workload.layouts import Floats, Layouts
from meshwright.plan.workload.workload import Workload

# Tokens, targets and positions are int64, the loss weights fp32.
BATCH_BYTES_PER_TOKEN = 28.0
ITEMS = ("gradients", "gathered", "activations", "cast weights", "working set", "logits", "exchange")


def is_covered(work: Workload, stack: Framework) -> bool:
    """Whether the table has the blocks of what is trained."""
    model = work.model
    return (
        stack.is_traced
        and work.precision in ("bf16", "fp16", "fp8", "mxfp8")
        and not work.adapters
        and model.dropout == 0
    )


def covered_layouts(at: Layouts) -> Mask:
    """Of those, the layouts; shape (N, 1)."""
    return ((at.regather == 0) & (at.etp == 1) & (at.ep_overlap == 0))[:, None]


def peak_items(work: Workload, at: Layouts, stack: Framework, rank: Rank, state: Items) -> Items:
    """Items of the fullest phase of every rank, shape (N, 3)."""
    return _fullest(work, at, state, candidates_of(Step(work, at, stack, rank), at))


def forward_items(work: Workload, at: Layouts, stack: Framework, rank: Rank, state: Items) -> Items:
    """Items of the fullest phase of a forward: a rank holds as much at its peak, or more."""
    return _fullest(work, at, state, [_forward_of(Step(work, at, stack, rank), snapshots(at))])


def _fullest(work: Workload, at: Layouts, state: Items, phases: Iterable["Competing"]) -> Items:
    """Items of the fullest of these phases, for every rank."""
    fullest = np.full((len(at), 3), -1.0)
    chosen = {name: np.zeros((len(at), 3)) for name in ITEMS}
    for rows, candidates in phases:
        _choose(rows, candidates, fullest, chosen)
    alone = at.pp == 1
    for values in chosen.values():  # one rank without a pipeline, two in the shortest
        values[alone] = values[alone][:, :1]
        values[at.pp == 2, 1] = values[at.pp == 2, 2]
    chosen.update({name: values for name, values in state.items() if name != "gradients"})
    # A pipeline joins the micro-batches of a step, of which it has cut its part of the sequence.
    copies = 1.0 + (at.pp > 1) / at.cp
    sequences = at.num_microbatches * at.microbatch_sequences * copies
    num_bytes = BATCH_BYTES_PER_TOKEN * work.sequence_length * sequences
    chosen["batch"] = np.zeros((len(at), 3)) + num_bytes[:, None]
    return chosen


def _choose(rows: Rows, candidates: Iterator["Candidate"], fullest: Floats, chosen: Items) -> None:
    """Put the items of the fullest candidate of each rank into `chosen`, where it exceeds `fullest`."""
    # As indices of the flat arrays, in which numpy finds a maximum per index much faster.
    cell, largest = rows.layout * fullest.shape[1] + rows.rank, fullest.reshape(-1)
    for phase in candidates:
        if not np.any(phase.happens):
            continue
        items = phase.items()
        total = np.where(phase.happens, sum(items.values()), -1.0)
        before = largest[cell]
        np.maximum.at(largest, cell, total)
        best = np.flatnonzero((total > before) & (total >= largest[cell]))
        if len(best) == 0:
            continue
        where = cell[best]
        for name, values in chosen.items():
            values.reshape(-1)[where] = items[name][best] if name in items else 0.0


class Candidate(NamedTuple):
    """A phase that may be the fullest; its sums are made only where it happens."""

    name: str
    happens: Mask | bool
    items: Callable[[], Items]


Competing = tuple[Rows, Iterator[Candidate]]
"""Rows and the candidates that compete for them."""


def candidates_of(step: Step, at: Layouts) -> Iterator[Competing]:
    """The candidates that compete, by rows."""
    found = snapshots(at)
    yield _forward_of(step, found)
    backward = BackwardSums(step, found.of_kind("B"))
    yield backward, _backward(backward)
    passes = found.of_kind("I", "W")
    if len(passes.layout):
        split = SplitSums(step, passes)
        yield split, _split(split, passes.kind == "I")
    ends = EndSums(step, found.of_kind("end"))
    yield ends, _ends(ends)


def _forward_of(step: Step, found: Snapshots) -> Competing:
    sums = ForwardSums(step, found.of_kind("F"))
    return sums, _forward(sums)


def _forward(sums: ForwardSums) -> Iterator[Candidate]:
    yield Candidate("head, forward", sums.is_last, sums.at_the_head)
    yield Candidate("last block, forward", True, sums.through_the_last_block)


def _backward(sums: BackwardSums) -> Iterator[Candidate]:
    """From each block to the one before it what is held grows or falls, so that the ends are enough."""
    yield Candidate("head, backward", sums.is_last, sums.behind_the_head)
    yield Candidate("last block, backward", True, sums.in_the_last_block)
    # Where gradients are there already, and stay, early blocks hold less than the last one.
    grows = sums.is_new | sums.launches
    for name, at_least in zip(EARLY_BLOCKS, (1, 3, 4), strict=True):
        happens = grows & (sums.layers >= at_least)
        yield Candidate(f"{name}, backward", happens, partial(sums.in_an_early_block, name))
    is_reduced = sums.is_sharded & sums.overlaps
    yield Candidate("block reduced", is_reduced, sums.after_the_first_block)
    is_launched = sums.launches & (sums.inner_launch.elements > 0)
    yield Candidate("launch", is_launched, sums.at_a_launch)
    widens = is_reduced & sums.in_pipeline & (sums.scattered < 1.0) & (sums.count["latest"] > 0)
    yield Candidate("gradients taken", widens, sums.when_gradients_are_taken)
    sums_experts = sums.sums_experts_alone() & ~sums.in_pipeline & (sums.count["is_final"] > 0)
    yield Candidate("experts summed", sums_experts, sums.when_experts_are_summed)
    yield Candidate("end of backward", True, sums.at_the_end)
    yield Candidate("reduction", sums.launches, sums.in_flight)


def _split(sums: SplitSums, is_input: Mask) -> Iterator[Candidate]:
    yield Candidate("input pass", is_input, sums.in_the_input_pass)
    yield Candidate("weight pass", ~is_input, sums.in_the_weight_pass)
    yield Candidate("end of weight pass", ~is_input, sums.after_the_weight_pass)


def _ends(sums: EndSums) -> Iterator[Candidate]:
    happens = sums.in_pipeline & sums.is_due & ~sums.scatters
    yield Candidate("reduction after the schedule", happens, sums.reduction)
    sums_experts = sums.sums_experts_alone() & sums.in_pipeline
    yield Candidate("experts summed after the schedule", sums_experts, sums.when_experts_are_summed)
    yield Candidate("update", True, sums.in_the_update)
