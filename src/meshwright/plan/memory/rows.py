"""What the phases of a step are added up from: one row for each snapshot of a rank of a layout.

Every array has shape (R,). A row's stage is the pipeline stage that the snapshot's action belongs to; others
may be on the same rank.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.plan.framework import Framework
from meshwright.plan.memory.block_bytes import TURNS, Items, Turn
from meshwright.plan.memory.block_columns import BlockColumns, Mask
from meshwright.plan.memory.buckets import ARRIVAL, BUCKET_ELEMENTS, Stage
from meshwright.plan.memory.offload import ON_DEVICE_AT_ONCE
from meshwright.plan.memory.snapshots import Snapshots
from meshwright.plan.workload.layouts import FULL, NORMS, Floats, Layouts
from meshwright.plan.workload.schedules import SCHEDULES, V_SHAPED
from meshwright.plan.workload.workload import Workload

FLAT_FACTS = ("last", "ends", "largest", "largest_parameter", "reduction", "tail", "waiting")
EARLY_BLOCKS = ("first block", "second block", "last block but one")


@dataclass(frozen=True)
class Rank:
    """Facts of the three ranks, shape (N, 3), that the planner has worked out already."""

    layers: Floats
    last_layers: Floats
    """Layers of the model's last stage, shape (N, 1)."""
    parameters: Floats
    """On this rank before ZeRO shards anything."""
    sharded_parameters: Floats
    """The part that ZeRO leaves on the fullest rank."""
    gathered_parameters: Floats
    """What ZeRO-3 gathers in a pipeline."""


class InnerLaunch(NamedTuple):
    """A bucket that is launched within a block; shape (R,)."""

    block: Floats
    """Blocks before it."""
    elements: Floats
    """On this rank; 0 where there is no such bucket."""
    sent: Floats
    """Elements launched before."""
    after: Floats
    """What the block holds at that phase."""


class Step:
    """A workload, its layouts and what a block of each is: what all rows are made of."""

    def __init__(self, work: Workload, at: Layouts, stack: Framework, rank: Rank) -> None:
        self.work, self.at, self.stack, self.rank = work, at, stack, rank
        self.blocks = BlockColumns(work, at, stack)


class Rows:
    """Bytes and elements of the rank and the stage of every snapshot."""

    def __init__(self, step: Step, snaps: Snapshots) -> None:
        self.step, self.work, self.stack, self.count = step, step.work, step.stack, snaps.counts
        self.layout, self.rank = snaps.layout, snaps.rank
        self.at = step.at.take(snaps.layout)
        self._blocks = step.blocks
        self._block_index = step.blocks.index[snaps.layout]
        self._set_streams()
        self._set_stages()
        self._set_gradients()

    def block(self, values: Floats) -> Floats:
        """An array of BlockColumns, for every row."""
        return values[self._block_index]

    def _set_streams(self) -> None:
        work, at = self.work, self.at
        self.tp = at.tp.astype(np.float64)
        self.tokens = at.microbatch_tokens(work.sequence_length)
        self.full_stream = work.working_bytes * self.tokens * work.model.width
        self.stream = self.full_stream / self.tp
        """Bytes of the residual stream of one micro-batch."""
        self.gathered_stream = np.where(self.tp > 1, self.full_stream, 0.0)
        self.keeps_inputs = work.compiled | ((at.recompute & (FULL | NORMS)) > 0)
        """Blocks keep their input as it is; a received one lies in its receive buffer."""
        self.is_offloaded = at.offloads("activations") > 0
        self.kept, self.casts = self.block(self._blocks.kept), self.block(self._blocks.casts)
        self.elements = self.block(self._blocks.elements)
        self.gathered_elements = self.block(self._blocks.gathered_elements)

    def _set_stages(self) -> None:
        """Which ends of the model the rank and the stage have, and how many layers."""
        at, facts = self.at, self.step.rank
        self.in_pipeline = at.pp > 1
        is_v = np.isin(at.schedule, [SCHEDULES.index(name) for name in sorted(V_SHAPED)])
        self.has_first: Mask = ~self.in_pipeline | (self.rank == 0)
        self.has_last: Mask = ~self.in_pipeline | (self.rank == np.where(is_v, 0, 2))
        self.is_first = self.count["in_first_stage"] > 0
        self.is_last = self.count["in_last_stage"] > 0
        self.stages = np.where(self.in_pipeline, at.virtual_stages, 1).astype(np.float64)
        self.rank_layers = facts.layers[self.layout, self.rank]
        self.last_layers = np.where(self.in_pipeline, facts.last_layers[self.layout, 0], self.rank_layers)
        others = self.stages - self.has_last
        rest = self.rank_layers - np.where(self.has_last, self.last_layers, 0.0)
        self.other_layers = rest / np.maximum(others, 1.0)
        self.layers = np.where(self.is_last, self.last_layers, self.other_layers)

    def _set_gradients(self) -> None:
        at, facts, state = self.at, self.step.rank, self.stack.state
        self.each = state.gradient
        self.microbatches = at.num_microbatches.astype(np.float64)
        self.shards = at.shards.astype(np.float64)
        self.is_sharded = at.zero == 3
        casts = 2.0 * float(state.weight > self.work.working_bytes)
        self.weight_casts = np.where(self.is_sharded, 0.0, casts)
        self.table = self.work.model.vocab_size * self.work.model.width / self.tp
        """Elements of the head, or of the embedding."""
        self.is_tied = self.work.model.tied_head
        self.head = np.where(self.in_pipeline | (not self.is_tied), self.table, 0.0)
        self.parameters = facts.parameters[self.layout, self.rank]
        ends = np.where(self.has_first, self.table, 0.0) + np.where(self.has_last, self.head, 0.0)
        self.layer_parameters = (self.parameters - ends) / self.rank_layers
        self.shard_share = facts.sharded_parameters[self.layout, self.rank] / self.parameters
        self.gathered_parameters = facts.gathered_parameters[self.layout, self.rank]
        self.scatters = at.scatters_each(in_pipelines=self.stack.scatters_in_pipelines)
        self.overlaps = self.scatters | ~self.in_pipeline
        """Gradients are launched within a backward."""
        self.is_due = ~self.is_sharded & (at.dp * at.cp > 1)
        """Our reducer launches gradients; FSDP2 does it by itself."""
        self.launches = self.is_due & (self.scatters | (~self.in_pipeline & (self.count["is_final"] > 0)))
        """This backward launches gradients."""

    # Parameters and gradients of stages.

    def stage_elements(self, number: Floats, first: Floats | Mask, last: Floats | Mask) -> Floats:
        """Parameters of so many stages of the rank, the model's first and last among them or not."""
        layers = (number - last) * self.other_layers + last * self.last_layers
        return layers * self.layer_parameters + first * self.table + last * self.head

    @cached_property
    def own_elements(self) -> Floats:
        """Parameters of the row's stage."""
        return self.stage_elements(np.ones_like(self.tp), self.is_first, self.is_last)

    def counted_elements(self, name: str) -> Floats:
        """Parameters of the stages that a count of the snapshot has."""
        count = self.count
        return self.stage_elements(count[name], count[f"{name}_first"], count[f"{name}_last"])

    @cached_property
    def left(self) -> Floats:
        """Bytes of gradients that earlier backwards have left when a backward begins."""
        return self.each * self.counted_elements("graded") * np.where(self.scatters, self.shard_share, 1.0)

    @cached_property
    def has_gradients(self) -> Mask:
        """Whether the stage has gradients already."""
        return self.count["has_gradients"] > 0

    @cached_property
    def is_new(self) -> Mask:
        """Whether this backward adds to no full gradients."""
        return ~self.has_gradients | self.scatters

    @property
    def scattered(self) -> float:
        """Bytes of a gradient that FSDP2 has scattered, in units of what sums of gradients have."""
        return min(self.stack.state.weight / self.each, 1.0)

    @cached_property
    def rows_of_buckets(self) -> Floats:
        """Ranks that shard a bucket."""
        return np.where(self.at.zero > 0, self.shards, 1.0)

    @cached_property
    def tied_table(self) -> Floats:
        """Elements of a table whose gradient waits from the head's backward to the embedding's.

        ZeRO-3 gathers it for a full pass, as it belongs to the root.
        """
        return np.where(self.is_last & self.is_first & self.is_tied, self.table, 0.0)

    def gathered(self, now: Floats, in_flight: Floats | float = 0.0) -> Floats:
        """ZeRO-3: weights gathered at this phase, and gradients that are being reduced.

        A pipeline gathers all weights once; where it reduces once, too, nothing is in flight before the end.
        """
        weights = np.where(self.in_pipeline, 2.0 * self.gathered_parameters, now)
        return np.where(self.is_sharded, weights + np.where(self.overlaps, in_flight, 0.0), 0.0)

    # Micro-batches in flight.

    def activations(self, own_blocks: Floats, own: float = 1.0, *, in_use: float = 0.0) -> Floats:
        """What so many blocks of the stage keep, and all other micro-batches in flight on the rank.

        A received input lies in its receive buffer. `own`: 0 when the row's micro-batch is done. `in_use`: 1
        when a further block is at work, whose tensors the caller adds.
        """
        count = self.count
        kept, kept_first = count["kept"] + own, count["kept_first"] + own * self.is_first
        received = np.where(self.keeps_inputs, (kept - kept_first) * self.stream, 0.0)
        # The fp32 input of the norm before the head.
        normed = 2.0 * count["kept_last"] * self.stream
        blocks = self._other_blocks + own_blocks
        # With offload two blocks are on the device: one in use, the other on its way.
        here = np.minimum(blocks, ON_DEVICE_AT_ONCE - in_use)
        blocks = np.where(self.is_offloaded, here, blocks)
        received = np.where(self.is_offloaded, 0.0, received)
        return blocks * self.kept + kept * self.tables - received + normed + self._waiting

    def cast_weights(self, own_blocks: Floats) -> Floats:
        """Kept casts of the same blocks, and of those that wait for W."""
        return (self._other_blocks + self._waiting_layers + own_blocks) * self.casts

    @cached_property
    def _other_blocks(self) -> Floats:
        kept, last = self.count["kept"], self.count["kept_last"]
        return (kept - last) * self.other_layers + last * self.last_layers

    @cached_property
    def _waiting_layers(self) -> Floats:
        waiting, last = self.count["waiting"], self.count["waiting_last"]
        return (waiting - last) * self.other_layers + last * self.last_layers

    @cached_property
    def _waiting(self) -> Floats:
        """What micro-batches between the passes of a split backward hold."""
        waiting, last = self.count["waiting"], self.count["waiting_last"]
        finished = self.count["finished_last"]
        if not (waiting + finished).any():
            return np.zeros_like(waiting)
        between = self.block(self._blocks.split["between"])
        # The input gradient of a stage's first block is counted by itself.
        held = (
            self._waiting_layers * between + waiting * (self.tables - self.stream) + last * self.head_between
        )
        leftover = self.last_layers * self.block(self._blocks.split["leftover"]) + self.stream
        return held + finished * leftover

    @cached_property
    def head_between(self) -> Floats:
        """What head and loss hold between the passes of a split backward."""
        return 4.0 * self.table + 5.0 * self.stream + self.full_stream

    @cached_property
    def tables(self) -> Floats:
        """Rope cosines and sines of one micro-batch, fp32."""
        attention = self.work.model.attention
        width = attention.latent.rope_width if attention.latent else attention.head_width
        return 4.0 * self.tokens * (width if self.work.model.positions == "rope" else 0)

    @cached_property
    def head_gradients(self) -> Floats:
        """Of one micro-batch: the loss makes them in its forward and keeps them for its backward."""
        return self.full_stream + 4.0 * self.table

    @cached_property
    def other_heads(self) -> Floats:
        """What the loss has made of the other micro-batches."""
        return self.count["kept_last"] * self.head_gradients

    def exchange(self, own_sent: float) -> Floats:
        """Receive buffers of every micro-batch, and what was sent on and waits for its gradient.

        `own_sent`: 1 when the stage's output is made, which the last stage does not send.
        """
        count = self.count
        neighbours = 2.0 * self.stages - self.has_first - self.has_last
        sent = count["sent"] + own_sent * count["sends"]
        back = count["sent_back"] + count["input_gradients"]
        return np.where(self.in_pipeline, (neighbours * self.microbatches + sent + back) * self.stream, 0.0)

    # Buckets.

    @cached_property
    def _bucket_stages(self) -> tuple[list[tuple[Stage, int]], NDArray[np.intp]]:
        """Stages that differ in their buckets, with the ranks that shard these; which one each row has.

        Stages that are reduced one by one have buckets of their own; else a rank's stages share them.
        """
        alone = self.scatters | ~self.in_pipeline
        layers = np.where(alone, self.layers, self.rank_layers).astype(np.int64)
        has_first = np.where(alone, self.is_first, self.has_first)
        ends = 2 * has_first + np.where(alone, self.is_last, self.has_last)
        shards = np.where(self.at.zero > 0, self.at.shards, 0)
        code = ((shards * (int(layers.max(initial=0)) + 1) + layers) * 4 + ends) * 2 + (self.tp > 1)
        parts = self._expert_parts()
        for part in parts:
            code = code * (int(part.max(initial=0)) + 1) + part
        code = np.where(self.is_due, code, -1)  # FSDP2 has no such buckets, and one rank needs none
        _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
        found: list[tuple[Stage, int]] = []
        for row in first:
            end, cuts = int(ends[row]), (int(part[row]) for part in parts)
            stage = Stage(max(int(layers[row]), 1), end >= 2, end % 2 == 1, bool(self.tp[row] > 1), *cuts)
            found.append((stage, int(shards[row])))
        return found, inverse.reshape(-1)

    def _expert_parts(self) -> list[NDArray[np.int64]]:
        """tp, ep and the ranks that shard experts, where there are some."""
        at, none = self.at, np.ones(len(self.at), dtype=np.int64)
        if self.work.model.moe is None:
            return []
        shards = np.maximum(at.dp_shard * at.cp // at.ep, 1)
        return [at.tp, at.ep, np.where(np.isin(at.zero, (1, 2)), shards, none)]

    @property
    def _cut(self) -> Floats:
        """What divides the sizes of buckets: with experts they are those of a rank already."""
        return self.tp if self.work.model.moe is None else np.ones_like(self.tp)

    @cached_property
    def flats(self) -> Items:
        """Elements on this rank of facts of the row's buckets."""
        stages, inverse = self._bucket_stages
        known = self.work.buckets
        facts = np.zeros((len(stages), len(FLAT_FACTS) + len(EARLY_BLOCKS)))
        for row, (stage, shards) in enumerate(stages):
            found = known.flats(stage)
            held = known.fullest_reductions(stage, float(shards))
            sent = [known.sent_before(stage, block) for block in (0, 1, stage.num_layers - 2)]
            facts[row] = (
                found.last,
                found.ends,
                found.largest,
                found.largest_parameter,
                *held,
                found.waiting,
                *sent,
            )
        table = facts[inverse] / self._cut[..., None]
        names = (*FLAT_FACTS, *(f"sent before the {name}" for name in EARLY_BLOCKS))
        return {name: table[..., index] for index, name in enumerate(names)}

    @cached_property
    def inner_launch(self) -> InnerLaunch:
        """The first bucket that a block before the stage's last one completes; in pipelines, any."""
        stages, inverse = self._bucket_stages
        facts = np.zeros((len(stages), 4))
        for row, (stage, _) in enumerate(stages):
            launches = self.work.buckets.launches(stage)
            before = self.work.model.num_layers - stage.num_layers
            is_whole = stage.has_embedding and stage.has_head
            last = stage.num_layers - 1 if is_whole else stage.num_layers
            inner = next((one for one in launches if one.block - before < last), None)
            if inner:
                facts[row] = (inner.block - before, inner.elements, inner.sent, ARRIVAL.index(inner.name))
        block, elements, sent, name = np.moveaxis(facts[inverse], -1, 0)
        after = np.zeros_like(block)
        for index, known in enumerate(ARRIVAL):
            if known in self._blocks.after:
                after = np.where(name == index, self.block(self._blocks.after[known]), after)
        return InnerLaunch(block, elements / self._cut, sent / self._cut, after)

    def waiting_experts(self, blocks: Floats) -> Floats:
        """Gradients of the experts of so many blocks that wait for the buckets before theirs."""
        is_apart = (self.tp > 1) | (self.at.ep > 1)
        return np.where(is_apart, self.each * blocks * self.block(self._blocks.expert_elements), 0.0)

    def sums_experts_alone(self) -> Mask:
        """Whether tp alone makes gradients wait for others: of experts, which it does not shard."""
        return (self.at.dp * self.at.cp == 1) & (self.tp > 1) & (self.work.model.moe is not None)

    def expert_bucket(self) -> tuple[float, Floats, Mask]:
        """Elements of an expert matrix, how many of them the first bucket has, and whether they fill it."""
        moe = self.work.model.moe
        assert moe is not None
        matrix = float(moe.num_experts * moe.width * self.work.model.width)
        count = np.minimum(np.ceil(BUCKET_ELEMENTS / matrix), 3.0 * self.rank_layers)
        return matrix, count, count * matrix >= BUCKET_ELEMENTS

    @cached_property
    def backward_peak(self) -> Items:
        """The peak of a block's backward in this row's turn."""
        return self._in_turn(self._blocks.back)

    @cached_property
    def last_backward_peak(self) -> Items:
        """The same of the stage's last block, behind a head where the stage has one."""
        headed, plain = self._blocks.back_to_head, self.backward_peak
        if headed is self._blocks.back:
            return plain
        found = self._in_turn(headed)
        return {name: np.where(self.is_last, values, plain[name]) for name, values in found.items()}

    def _in_turn(self, by_turn: dict[Turn, Items]) -> Items:
        is_final, has_gradients = self.count["is_final"] > 0, self.has_gradients
        found: Items = {}
        for name in by_turn["first"]:
            first, later, last = (self.block(by_turn[turn][name]) for turn in TURNS)
            found[name] = np.where(is_final, last, np.where(has_gradients, later, first))
        return found
