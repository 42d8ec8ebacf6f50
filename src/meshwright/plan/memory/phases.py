"""The fullest moment of a step of our own runtime, to the byte where it is covered.

Some moments compete, and every rank is at the fullest of its own:

    head, forward      everything kept for backward exists, and a chunk of logits beside the head's gradient
    head, backward     the head's gradient is there twice
    last block, back   of the first micro-batch to come back, of a later one, and of the last one, which
                       sends gradients off in flat buffers
    first block, back  little is kept any more, and all gradients are there
    end of backward    the embedding's gradient, and the last gradients on their way
    update             ZeRO-1 and 2 gather what others updated

The blocks are written down on a tape (block_tape.py), the moments are added up in moment_sums.py. The
rehearsal traces the same step and a test holds the two together.

Covered: 16-bit compute without compiler, dense or routed layers, gpipe, 1f1b and interleaved 1f1b. How exact
that is stands in margins.py.
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
from meshwright.spec.model import MoeSpec

COVERED_SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b")
# Tokens, targets and positions are int64, the loss weights fp32.
BATCH_BYTES_PER_TOKEN = 28.0
DOCUMENT_BYTES_PER_TOKEN = 8.0


def is_covered(work: Workload, stack: Framework) -> bool:
    """Whether the sums of this file hold for what is trained."""
    model = work.model
    return (
        stack.name == "meshwright"
        and work.precision in ("bf16", "fp16", "fp8", "mxfp8")
        and not work.adapters
        and work.attention_kernel == "flash"
        and model.dropout == 0
    )


def _is_plainly_routed(moe: MoeSpec) -> bool:
    """Every layer has experts, which take all rows that are sent to them."""
    return not moe.first_dense_layers and moe.capacity_factor is None


def covered_layouts(at: Layouts) -> Mask:
    """Of those, the layouts; shape (N, 1)."""
    here = (at.offloads("parameters") == 0) & (at.offloads("activations") == 0)
    return ((at.regather == 0) & (at.etp == 1) & here)[:, None]


def peak_items(work: Workload, at: Layouts, stack: Framework, rank: Rank, state: Items) -> Items:
    """Items of the fullest moment of every rank."""
    sums = Sums(work, at, stack, rank)
    moments: list[Items] = []
    fullest = np.zeros((len(at), 3))
    which = np.zeros((len(at), 3), dtype=np.intp)
    for moment in moments_of(sums):
        if np.any(moment.happens):
            items = moment.items()
            total = np.where(moment.happens, sum(items.values()), 0.0)
            is_fuller = total > fullest
            fullest = np.where(is_fuller, total, fullest)
            which[is_fuller] = len(moments)
            moments.append(items)
    chosen = _chosen(moments, which)
    chosen.update({name: values for name, values in state.items() if name != "gradients"})
    # A pipeline joins the micro-batches of a step, of which it has cut its part of the sequence.
    copies = 1.0 + (at.pp > 1) / at.cp
    sequences = at.num_microbatches * at.microbatch_sequences * copies
    each = BATCH_BYTES_PER_TOKEN + DOCUMENT_BYTES_PER_TOKEN * work.separate_documents
    chosen["batch"] = np.zeros((len(at), 3)) + (each * work.sequence_length * sequences)[:, None]
    return chosen


def _chosen(moments: list[Items], which: NDArray[np.intp]) -> Items:
    """The items of one moment for each rank."""
    chosen = {name: np.zeros(which.shape) for name in dict.fromkeys(chain(*moments))}
    for index, items in enumerate(moments):
        here = which == index
        for name, values in items.items():
            chosen[name][here] = np.broadcast_to(values, which.shape)[here]
    return chosen


class Moment(NamedTuple):
    """One that competes; its sums are made only where it happens."""

    name: str
    happens: Mask | bool
    items: Callable[[], Items]


def moments_of(sums: Sums) -> Iterator[Moment]:
    """The moments that compete.

    From each block to the one before it what is held grows or falls, so that the ends are enough.
    """
    in_pipeline = sums.scatters & (sums.pp > 1)
    yield Moment("head, forward", sums.is_last, sums.at_the_head)
    yield Moment("head, backward", sums.is_last, sums.behind_the_head)
    yield Moment("last block, forward", True, sums.through_the_last_block)
    is_reduced = sums.is_sharded & sums.overlaps
    is_sent = sums.is_due() & sums.overlaps & (sums.inner_launch.elements > 0)
    for turn in TURNS:
        has_turn = in_pipeline | (turn != "later")
        has_middle = sums.has_middle() | (turn != "later")
        yield Moment(f"last block, {turn}", has_middle, partial(sums.in_the_last_block, turn))
        for name, at_least in zip(EARLY_BLOCKS, (1, 3, 4), strict=True):
            happens = has_turn & (sums.rank.layers >= at_least)
            yield Moment(f"{name}, {turn}", happens, partial(sums.in_an_early_block, name, turn))
        yield Moment(f"block reduced, {turn}", is_reduced, partial(sums.after_the_first_block, turn))
        is_sent_now = is_sent & (in_pipeline | (turn == "last"))
        yield Moment(f"launch, {turn}", is_sent_now, partial(sums.at_a_launch, turn))
    yield Moment("gradients taken", sums.widens_later(), sums.when_gradients_are_taken)
    yield Moment("experts summed", sums.sums_experts_alone(), sums.when_experts_are_summed)
    yield Moment("end of backward", True, sums.at_the_end)
    yield Moment("reduction", True, sums.on_the_way)
    yield Moment("update", True, sums.in_the_update)
