"""The memory peak of a step of our own runtime: the largest of the phases in which a rank may be fullest.

    head, forward        kept tensors of all micro-batches in flight, a chunk of logits, the head's gradient
    head, backward       the head's gradient is there twice
    last block, forward  the block's own peak beside what the others keep
    last block, back     in the first backward, in a later one, and in the last one, which launches buckets
    first block, back    little is kept any more, and all gradients are there
    end of backward      the embedding's gradient, and the last buckets in flight
    update               ZeRO-1 and 2 gather what others updated

What a block keeps and holds at its peaks stands in block_table.json, which the trace wrote (block_table.py,
block_bytes.py). phase_sums.py adds up each phase. Not covered: `regather`, etp, fp32 compute, adapters,
dropout; formula.py estimates these. margins.py says how exact each kind is.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.plan.framework import Framework
from meshwright.plan.memory.block_bytes import Items
from meshwright.plan.memory.phase_sums import Sums
from meshwright.plan.memory.rank_facts import EARLY_BLOCKS, TURNS, Mask, Rank
from meshwright.plan.workload.layouts import Layouts
from meshwright.plan.workload.workload import Workload

# Tokens, targets and positions are int64, the loss weights fp32.
BATCH_BYTES_PER_TOKEN = 28.0


def is_covered(work: Workload, stack: Framework) -> bool:
    """Whether the table has the blocks of what is trained."""
    model = work.model
    return (
        stack.name == "meshwright"
        and work.precision in ("bf16", "fp16", "fp8", "mxfp8")
        and not work.adapters
        and work.attention_kernel == "flash"
        and model.dropout == 0
    )


def covered_layouts(at: Layouts) -> Mask:
    """Of those, the layouts; shape (N, 1)."""
    return ((at.regather == 0) & (at.etp == 1))[:, None]


def peak_items(work: Workload, at: Layouts, stack: Framework, rank: Rank, state: Items) -> Items:
    """Items of the fullest phase of every rank."""
    sums = Sums(work, at, stack, rank)
    candidates: list[Items] = []
    fullest = np.zeros((len(at), 3))
    which = np.zeros((len(at), 3), dtype=np.intp)
    for phase in candidates_of(sums):
        if np.any(phase.happens):
            items = phase.items()
            total = np.where(phase.happens, sum(items.values()), 0.0)
            is_fuller = total > fullest
            fullest = np.where(is_fuller, total, fullest)
            which[is_fuller] = len(candidates)
            candidates.append(items)
    chosen = _chosen(candidates, which)
    chosen.update({name: values for name, values in state.items() if name != "gradients"})
    # A pipeline joins the micro-batches of a step, of which it has cut its part of the sequence.
    copies = 1.0 + (at.pp > 1) / at.cp
    sequences = at.num_microbatches * at.microbatch_sequences * copies
    num_bytes = BATCH_BYTES_PER_TOKEN * work.sequence_length * sequences
    chosen["batch"] = np.zeros((len(at), 3)) + num_bytes[:, None]
    return chosen


def _chosen(candidates: list[Items], which: NDArray[np.intp]) -> Items:
    """The items of one phase for each rank."""
    chosen = {name: np.zeros(which.shape) for name in dict.fromkeys(chain(*candidates))}
    for index, items in enumerate(candidates):
        here = which == index
        for name, values in items.items():
            chosen[name][here] = np.broadcast_to(values, which.shape)[here]
    return chosen


class Candidate(NamedTuple):
    """One that competes; its sums are made only where it happens."""

    name: str
    happens: Mask | bool
    items: Callable[[], Items]


def candidates_of(sums: Sums) -> Iterator[Candidate]:
    """The candidates that compete.

    From each block to the one before it what is held grows or falls, so that the ends are enough.
    """
    in_pipeline = sums.scatters & (sums.pp > 1)
    yield Candidate("head, forward", sums.is_last, sums.at_the_head)
    yield Candidate("head, backward", sums.is_last, sums.behind_the_head)
    yield Candidate("last block, forward", True, sums.through_the_last_block)
    is_reduced = sums.is_sharded & sums.overlaps
    is_sent = sums.is_due() & sums.overlaps & (sums.inner_launch.elements > 0)
    for turn in TURNS:
        has_turn = in_pipeline | (turn != "later")
        has_middle = sums.has_middle() | (turn != "later")
        yield Candidate(f"last block, {turn}", has_middle, partial(sums.in_the_last_block, turn))
        for name, at_least in zip(EARLY_BLOCKS, (1, 3, 4), strict=True):
            happens = has_turn & (sums.rank.layers >= at_least)
            yield Candidate(f"{name}, {turn}", happens, partial(sums.in_an_early_block, name, turn))
        yield Candidate(f"block reduced, {turn}", is_reduced, partial(sums.after_the_first_block, turn))
        is_sent_now = is_sent & (in_pipeline | (turn == "last"))
        yield Candidate(f"launch, {turn}", is_sent_now, partial(sums.at_a_launch, turn))
    yield Candidate("gradients taken", sums.widens_later(), sums.when_gradients_are_taken)
    yield Candidate("experts summed", sums.sums_experts_alone(), sums.when_experts_are_summed)
    yield Candidate("end of backward", True, sums.at_the_end)
    yield Candidate("reduction", True, sums.on_the_way)
    yield Candidate("update", True, sums.in_the_update)
