"""What the trace's table says of one block of every layout; layouts whose blocks are alike share an entry."""

from collections.abc import Callable
from functools import cached_property, partial
from itertools import product

import numpy as np
from numpy.typing import NDArray

from meshwright.plan.framework import Framework
from meshwright.plan.memory.block_bytes import TURNS, BlockBytes, Items, Reduction, Turn
from meshwright.plan.memory.buckets import ARRIVAL, Stage
from meshwright.plan.workload.layouts import Floats, Layouts
from meshwright.plan.workload.workload import Workload
from meshwright.spec.parameters import Parameter, layer_parameters

Mask = NDArray[np.bool_]


class BlockColumns:
    """Bytes and elements of one block; `index` says which entry of an array a layout has."""

    def __init__(self, work: Workload, layouts: Layouts, stack: Framework) -> None:
        at, self.index = _distinct(layouts)
        self._at, self._found = at, BlockBytes(work, at, stack)
        self.kept, self.casts = self._found.kept, self._found.casts
        self.remembered = self._found.remembered
        """Casts of weights that autocast remembers until the forward ends."""
        self._set_elements(work, at)
        # At ZeRO-2 nothing is left of earlier full gradients, and each micro-batch reduces its own.
        self._scatters = at.scatters_each(in_pipelines=stack.scatters_in_pipelines) & (at.zero == 2)
        shared = at.dp * at.cp > 1
        self._due = (at.zero < 3) & shared
        self._fused = work.compiled & ~shared & (at.tp == 1) & (at.pp == 1) & (at.num_microbatches > 1)
        self._buckets = partial(_buckets, work, at, stack)

    # Most layouts do not fit, which their forward shows: the rest is worked out where it is asked for.

    @cached_property
    def forward(self) -> Floats:
        """Peak of a block's forward, beyond its input."""
        return self._found.forward()

    @cached_property
    def split(self) -> Items:
        """Peaks of a split backward, and what a block holds between its passes."""
        return self._found.split()

    @cached_property
    def after(self) -> Items:
        """Bytes of a block when one of its gradients has come."""
        return self._found.after()

    @cached_property
    def back(self) -> dict[Turn, Items]:
        """The backward of a block."""
        return self._by_turn(partial(self._buckets, has_head=False))

    @cached_property
    def back_to_head(self) -> dict[Turn, Items]:
        """Of a stage's last block behind a head, whose gradients fill the same buckets."""
        launches = self._due & ((self._at.pp == 1) | self._scatters)
        if not launches.any():
            return self.back
        return self._by_turn(partial(self._buckets, has_head=True), like=self.back)

    @property
    def after_experts(self) -> Floats:
        """`after` of the experts' last matrix; where its arrival was not traced (fp8), the largest known."""
        known = self.after.get("experts.gate")
        return np.max(list(self.after.values()), axis=0) if known is None else known

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
        self.elements, self.expert_elements = elements, experts
        self.gathered_elements = elements + (padding - 1.0) * experts
        """Elements that ZeRO-3 gathers."""
        self.last_elements = local(matrices[-1])
        """Elements of the last matrix of the module."""

    def _by_turn(
        self, buckets: Callable[[Mask], Floats], like: dict[Turn, Items] | None = None
    ) -> dict[Turn, Items]:
        """The backward in each turn; `like` has the turns that are the same where no bucket is due."""
        by_turn: dict[Turn, Items] = {}
        for turn in TURNS:
            is_due = self._due & (((turn == "last") & (self._at.pp == 1)) | self._scatters)
            if not is_due.any() and like is not None:
                by_turn[turn] = like[turn]
            elif not is_due.any() and turn == "last":
                by_turn[turn] = by_turn["later"]
            else:
                accumulates = (turn != "first") & ~self._scatters & (self._at.num_microbatches > 1)
                reduction = Reduction(accumulates, self._fused & (turn != "first"), buckets(is_due))
                by_turn[turn] = self._found.backward(reduction)
        return by_turn


def kept_bytes(work: Workload, at: Layouts, stack: Framework) -> Floats:
    """What one block keeps of one micro-batch for its backward, shape (N, 1)."""
    rows, inverse = _distinct(at)
    return BlockBytes(work, rows, stack).kept[inverse][:, None]


def expert_padding(work: Workload, at: Layouts) -> Floats:
    """Gathered elements of experts over those on a rank: each rank's part is padded to full experts.

    Where ep spreads experts over ranks FSDP2 gathers them by themselves; that is not written down here.
    """
    moe = work.model.moe
    assert moe is not None
    each = np.ceil(moe.num_experts / at.shards)
    return np.where(at.ep > 1, 1.0, each * at.shards / moe.num_experts)


def _buckets(work: Workload, at: Layouts, stack: Framework, is_due: Mask, *, has_head: bool) -> Floats:
    """Bytes of the bucket that the gradient of each matrix of a stage's last block completes.

    One row for each of ARRIVAL, 0 where it completes none.
    """
    found = np.zeros((len(ARRIVAL), len(at)))
    if not is_due.any():
        return found
    is_apart = ((at.tp > 1) | (at.ep > 1)) & (work.model.moe is not None)
    part = np.where(at.zero > 0, 1.0 / at.shards, 0.0)
    for is_cut, is_alone, deals in product((False, True), repeat=3):
        rows = is_due & ((at.tp > 1) == is_cut) & ((at.pp == 1) == is_alone) & (is_apart == deals)
        # Only that experts go by themselves matters here: what is not theirs is as large on any rank of ep.
        has_embedding = is_alone and has_head
        stage = Stage(work.model.num_layers, has_embedding, has_head, is_cut, ep=2 if deals else 1)
        for launch in work.buckets.launches(stage) if rows.any() else ():
            if launch.block == work.model.num_layers - 1:
                held = stack.state.gradient * launch.elements / at.tp * (1.0 + part)
                found[ARRIVAL.index(launch.name)] += np.where(rows, held, 0.0)
    return found


def _distinct(at: Layouts) -> tuple[Layouts, NDArray[np.intp]]:
    """Layouts that differ in what a block sees, and which of them each layout is."""
    return at.distinct(
        *(getattr(at, name) for name in ("microbatch_sequences", "cp", "cp_kind", "cp_inner", "tp")),
        *(getattr(at, name) for name in ("recompute", "recompute_every", "zero", "reduce_last")),
        at.pp > 1,
        at.ep,
        at.shards,
        at.num_microbatches > 1,
        at.dp * at.cp > 1,
    )
