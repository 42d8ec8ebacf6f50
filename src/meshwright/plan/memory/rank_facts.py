"""What the phases of a step are added up from: bytes of one rank, and what the table says of its blocks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.plan.framework import Framework
from meshwright.plan.memory.block_bytes import TURNS, BlockBytes, Items, Reduction, Turn
from meshwright.plan.memory.buckets import ARRIVAL, Stage
from meshwright.plan.workload.layouts import FULL, NORMS, Floats, Layouts
from meshwright.plan.workload.schedules import SCHEDULES, V_SHAPED
from meshwright.plan.workload.workload import Workload
from meshwright.spec.parameters import Parameter, layer_parameters

Mask = NDArray[np.bool_]
FLAT_FACTS = ("last", "ends", "largest", "largest_parameter", "reduction", "tail", "waiting")
EARLY_BLOCKS = ("first block", "second block", "last block but one")


@dataclass(frozen=True)
class Rank:
    """Facts of the three ranks, shape (N, 3), that the planner has worked out already."""

    layers: Floats
    in_flight: Floats
    parameters: Floats
    """On this rank before ZeRO divides anything."""
    sharded_parameters: Floats
    """The part that ZeRO leaves on the fullest rank."""
    gathered_parameters: Floats
    """What ZeRO-3 gathers in a pipeline."""


class InnerLaunch(NamedTuple):
    """A bucket that is launched within a block; shape (N, 3)."""

    block: Floats
    """Blocks before it."""
    elements: Floats
    """On this rank; 0 where there is no such buffer."""
    sent: Floats
    """Elements launched before."""
    after: Floats
    """What the block holds at that phase."""


class Blocks:
    """What the trace's table says of one block of every layout, as columns of shape (N, 1)."""

    def __init__(self, work: Workload, at: Layouts, stack: Framework) -> None:
        rows, self._inverse = _distinct(at)
        found = BlockBytes(work, rows, stack)
        self.kept, self.casts = self._column(found.kept), self._column(found.casts)
        self.remembered = self._column(found.remembered)
        """Casts of weights that autocast remembers until the forward ends."""
        self.forward = self._column(found.forward)
        """Peak of a block's forward, beyond its input."""
        self._set_elements(work, rows)
        # At ZeRO-2 nothing is left of earlier full gradients, and each micro-batch reduces its own.
        self._scatters = rows.scatters_each(in_pipelines=stack.scatters_in_pipelines) & (rows.zero == 2)
        shared = rows.dp * rows.cp > 1
        self._due = (rows.zero < 3) & shared
        self._fused = work.compiled & ~shared & (rows.tp == 1) & (rows.pp == 1) & (rows.num_microbatches > 1)
        self.after = {name: self._column(values) for name, values in found.after().items()}
        """Bytes of a block when one of its gradients has come."""
        buckets = partial(_buckets, work, rows, stack)
        self.back = self._by_turn(found, rows, partial(buckets, has_ends=rows.pp == 1))
        """The backward of the last block."""
        self.inner_back = self._by_turn(
            found, rows, partial(buckets, has_ends=np.zeros(len(rows), dtype=bool))
        )
        """Of another one."""

    def _set_elements(self, work: Workload, at: Layouts) -> None:
        listed = layer_parameters(work.model, work.model.num_layers - 1)
        tp, ep = at.tp.astype(np.float64), at.ep.astype(np.float64)

        def local(one: Parameter) -> Floats:
            sharded = {"expert": ep, "matrix": tp, "bias": tp}
            return one.num_elements / sharded.get(one.kind, np.ones_like(tp))

        matrices = [one for one in listed if one.kind in ("matrix", "expert")]
        experts = sum((local(one) for one in matrices if one.kind == "expert"), 0.0 * tp)
        elements = sum((local(one) for one in matrices), 0.0 * tp)
        padding = expert_padding(work, at) if work.model.moe is not None else 1.0
        self.elements, self.expert_elements = self._column(elements), self._column(experts)
        self.gathered_elements = self._column(elements + (padding - 1.0) * experts)
        """That ZeRO-3 gathers."""
        self.last_elements = self._column(local(matrices[-1]))
        """Of the last matrix of the module."""

    def _by_turn(
        self, found: BlockBytes, at: Layouts, buckets: Callable[[Mask], dict[str, Floats]]
    ) -> dict[Turn, Items]:
        by_turn: dict[Turn, Items] = {}
        for turn in TURNS:
            accumulates = (turn != "first") & ~self._scatters & (at.num_microbatches > 1)
            is_due = self._due & (((turn == "last") & (at.pp == 1)) | self._scatters)
            reduction = Reduction(accumulates, self._fused & (turn != "first"), buckets(is_due))
            by_turn[turn] = self._columns(found.backward(reduction))
        return by_turn

    def _column(self, values: Floats) -> Floats:
        return values[self._inverse][:, None]

    def _columns(self, items: Items) -> Items:
        return {item: self._column(values) for item, values in items.items()}


def kept_bytes(work: Workload, at: Layouts, stack: Framework) -> Floats:
    """What one block keeps of one micro-batch for its backward, shape (N, 1)."""
    rows, inverse = _distinct(at)
    found = BlockBytes(work, rows, stack)
    return found.kept[inverse][:, None]


def expert_padding(work: Workload, at: Layouts) -> Floats:
    """Gathered elements of experts over those on a rank: each rank's part is padded to whole experts.

    Where ep spreads experts over ranks FSDP2 gathers them by themselves; that is not written down here.
    """
    moe = work.model.moe
    assert moe is not None
    each = np.ceil(moe.num_experts / at.shards)
    return np.where(at.ep > 1, 1.0, each * at.shards / moe.num_experts)


def _buckets(
    work: Workload, at: Layouts, stack: Framework, is_due: Mask, *, has_ends: Mask
) -> dict[str, Floats]:
    """Bytes of the buffers that a gradient of the last block completes, behind a head or not."""
    found: dict[str, Floats] = {}
    is_apart = ((at.tp > 1) | (at.ep > 1)) & (work.model.moe is not None)
    for is_cut, is_whole, deals in product((False, True), repeat=3):
        rows = is_due & ((at.tp > 1) == is_cut) & (has_ends == is_whole) & (is_apart == deals)
        # Only that experts go by themselves matters here: what is not theirs is as large on any rank of ep.
        stage = Stage(work.model.num_layers, is_whole, is_whole, is_cut, ep=2 if deals else 1)
        for launch in work.buckets.launches(stage) if rows.any() else ():
            if launch.block == work.model.num_layers - 1:
                part = np.where(at.zero > 0, 1.0 / at.shards, 0.0)
                held = stack.state.gradient * launch.elements / at.tp * (1.0 + part)
                found[launch.name] = found.get(launch.name, np.zeros(len(at))) + np.where(rows, held, 0.0)
    return found


def _distinct(at: Layouts) -> tuple[Layouts, NDArray[np.intp]]:
    """Layouts that differ in what a block sees, and which of them each layout is."""
    seen = [
        *(getattr(at, name) for name in ("microbatch_sequences", "cp", "cp_kind", "cp_inner", "tp")),
        *(getattr(at, name) for name in ("recompute", "recompute_every", "zero", "reduce_last")),
        at.pp > 1,
        at.ep,
        at.shards,
        at.num_microbatches > 1,
        at.dp * at.cp > 1,
    ]
    code = np.zeros(len(at), dtype=np.int64)
    for column in seen:
        code = code * (int(column.max(initial=0)) + 1) + column
    _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
    return at.take(first), inverse.reshape(-1)


class Facts:
    """Bytes and elements of every layout; all arrays have shape (N, 3) or (N, 1)."""

    def __init__(self, work: Workload, at: Layouts, stack: Framework, rank: Rank) -> None:
        self.work, self.at, self.stack, self.rank = work, at, stack, rank
        model = work.model
        self.blocks = Blocks(work, at, stack)
        self.tp = at.tp[:, None].astype(np.float64)
        self.tokens = at.microbatch_tokens(work.sequence_length)[:, None]
        self.whole_stream = work.working_bytes * self.tokens * model.width
        self.stream = self.whole_stream / self.tp
        self.gathered_stream = np.where(self.tp > 1, self.whole_stream, 0.0)
        self.keeps_inputs = work.compiled | ((at.recompute & (FULL | NORMS)) > 0)[:, None]
        """Blocks keep their input as it is; a received one lies in its receive buffer."""
        self.recomputes = ((at.recompute & (FULL | NORMS)) > 0)[:, None]
        self.pp = at.pp[:, None]
        is_v = np.isin(at.schedule, [SCHEDULES.index(name) for name in sorted(V_SHAPED)])[:, None]
        first, last = np.array([[True, False, False]]), np.array([[False, False, True]])
        self.is_last = np.where(is_v, first, last) | (self.pp == 1)
        self.is_first = first | (self.pp == 1)
        self.microbatches = at.num_microbatches[:, None].astype(np.float64)
        self.chunks = at.virtual_stages[:, None].astype(np.float64)
        turns = ("interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev")
        self.takes_turns = np.isin(at.schedule, [SCHEDULES.index(name) for name in turns])[:, None]
        self.shards = at.shards[:, None].astype(np.float64)
        self.is_sharded = (at.zero == 3)[:, None]
        self.casts = np.where(self.is_sharded, 0.0, 2.0 * float(stack.state.weight > work.working_bytes))
        self.table = model.vocab_size * model.width / self.tp
        """Elements of the head, or of the embedding."""
        self.is_tied = model.tied_head
        self._set_gradients()

    def _set_gradients(self) -> None:
        """Bytes of gradients as they are during the micro-batches of a step."""
        at, each = self.at, self.stack.state.gradient
        self.whole_gradients = each * self.rank.parameters
        sharded = each * self.rank.sharded_parameters
        self.sharded_gradients = np.where(at.zero[:, None] > 0, sharded, self.whole_gradients)
        self.scatters = at.scatters_each(in_pipelines=self.stack.scatters_in_pipelines)[:, None]
        self.overlaps = self.scatters | (self.pp == 1)
        """Gradients are launched within a backward."""
        left = np.where(self.scatters, self.sharded_gradients, self.whole_gradients)
        self.left_gradients = np.where(self.microbatches > 1, left, 0.0)
        """What earlier micro-batches have left when the last one comes."""
        self.head_gradient = np.where(self.is_last, each * self.table, 0.0)

    def tables(self) -> Floats:
        """Rope cosines and sines of one micro-batch, fp32."""
        attention = self.work.model.attention
        width = attention.latent.rope_width if attention.latent else attention.head_width
        return 4.0 * self.tokens * (width if self.work.model.positions == "rope" else 0)

    def activations(self, blocks: Floats, flight: Floats) -> Floats:
        """What so many blocks and the tables keep; a received input lies in its receive buffer."""
        inner = self.chunks - np.where(self.is_first, 1.0, 0.0)  # the first stage receives no input
        received = np.where(self.keeps_inputs, inner * self.stream, 0.0)
        return blocks * self.blocks.kept + flight * (self.chunks * self.tables() - received)

    def at_the_last_stage(self, flight: Floats) -> Floats:
        """Micro-batches in flight that are in the last stage; where stages take turns, one."""
        return np.where(self.takes_turns, np.minimum(flight, 1.0), flight)

    def head_gradients(self) -> Floats:
        """Of one micro-batch: the loss makes them in its forward and keeps them for its backward."""
        return self.whole_stream + 4.0 * self.table

    def gathered(self, now: Floats, on_the_way: Floats | float = 0.0) -> Floats:
        """ZeRO-3: weights gathered at this phase, and gradients that are being reduced.

        A pipeline gathers all weights once; where it reduces once, too, nothing is in flight before the end.
        """
        weights = np.where(self.pp > 1, 2.0 * self.rank.gathered_parameters, now)
        return np.where(self.is_sharded, weights + np.where(self.overlaps, on_the_way, 0.0), 0.0)

    def rows(self) -> Floats:
        """Ranks that divide a bucket."""
        return np.where(self.at.zero[:, None] > 0, self.shards, 1.0)

    def normed(self, flight: Floats) -> Floats:
        """The fp32 input of the norm before the head, of the other micro-batches."""
        return np.where(self.is_last, 2.0 * (self.at_the_last_stage(flight) - 1.0) * self.stream, 0.0)

    def waiting_head_gradients(self, flight: Floats) -> Floats:
        """What the loss has made of the other micro-batches."""
        others = np.maximum(self.at_the_last_stage(flight) - 1.0, 0.0)
        return np.where(self.is_last, others * self.head_gradients(), 0.0)

    def has_middle(self) -> Mask:
        """Whether a micro-batch finds gradients and sends none off."""
        sends = self.is_due() & self.overlaps
        return (self.microbatches > 1.0 + sends) | self.scatters

    def tied_table(self) -> Floats:
        """Elements of a table whose gradient waits from the head's backward to the embedding's.

        ZeRO-3 gathers it for a whole pass, as it belongs to the root.
        """
        return np.where(self.is_last & self.is_first & self.is_tied, self.table, 0.0)

    def scattered(self) -> float:
        """Bytes of a gradient that FSDP2 has scattered, in units of what sums of gradients have."""
        return min(self.stack.state.weight / self.stack.state.gradient, 1.0)

    def is_due(self) -> Mask:
        """Whether our reducer launches gradients; FSDP2 does it by itself."""
        return (~self.is_sharded) & (self.at.dp * self.at.cp > 1)[:, None]

    @cached_property
    def _stages(self) -> tuple[list[tuple[Stage, int]], NDArray[np.intp]]:
        """Stages that differ in their buckets, with the ranks that divide these; which one each is."""
        layers = self.rank.layers.astype(np.int64)
        ends = 2 * (self.is_first + 0 * layers) + (self.is_last + 0 * layers)
        shards = np.where(self.at.zero[:, None] > 0, self.at.shards[:, None], 0) + 0 * layers
        code = ((shards * (int(layers.max(initial=0)) + 1) + layers) * 4 + ends) * 2 + (self.tp > 1)
        parts = [np.broadcast_to(part[:, None], layers.shape) for part in self._expert_parts()]
        for part in parts:
            code = code * (int(part.max(initial=0)) + 1) + part
        _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
        found: list[tuple[Stage, int]] = []
        for at in first:
            end, is_cut = int(ends.reshape(-1)[at]), bool(self.at.tp[at // 3] > 1)
            cuts = (int(part.reshape(-1)[at]) for part in parts)
            stage = Stage(int(layers.reshape(-1)[at]), end >= 2, end % 2 == 1, is_cut, *cuts)
            found.append((stage, int(shards.reshape(-1)[at])))
        return found, inverse.reshape(layers.shape)

    def waiting_experts(self, blocks: Floats) -> Floats:
        """Gradients of the experts of so many blocks that wait for the buffers before theirs."""
        is_apart = (self.tp > 1) | (self.at.ep > 1)[:, None]
        return np.where(is_apart, self.stack.state.gradient * blocks * self.blocks.expert_elements, 0.0)

    def _expert_parts(self) -> list[NDArray[np.int64]]:
        """tp, ep and the ranks that divide experts, where there are some."""
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
        """Elements on this rank of facts of its buckets."""
        stages, inverse = self._stages
        known = self.work.buckets
        facts = np.zeros((len(stages), len(FLAT_FACTS) + len(EARLY_BLOCKS)))
        for row, (stage, shards) in enumerate(stages):
            found = known.flats(stage)
            held = [found.fullest_reduction(float(shards), is_tail=is_tail) for is_tail in (False, True)]
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
        stages, inverse = self._stages
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
            if known in self.blocks.after:
                after = np.where(name == index, self.blocks.after[known], after)
        return InnerLaunch(block, elements / self._cut, sent / self._cut, after)

    def exchange(self, flight: Floats) -> Floats:
        """Receive buffers of every micro-batch, and what was sent on and waits for its gradient."""
        ends = self.is_first.astype(np.float64) + self.is_last.astype(np.float64)
        neighbours = 2.0 * self.chunks - ends
        sent = self.chunks * flight - np.where(self.is_last, self.at_the_last_stage(flight), 0.0)
        # The last gradient that was sent back, once one was.
        goes_back = ~self.is_first | (self.chunks > 1)
        back = (goes_back & (self.microbatches > flight)).astype(np.float64)
        return np.where(self.pp > 1, (neighbours * self.microbatches + sent + back) * self.stream, 0.0)
