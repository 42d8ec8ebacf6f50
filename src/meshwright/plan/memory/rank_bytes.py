"""Bytes of one rank, itemised, for the first, the second (the fullest inner one) and the last pipeline rank.

Allocated is what tensors need at the peak of the step; reserved adds what the caching allocator holds and
cannot reuse (both as torch counts them); the device is also charged the context and the communicators'
buffers, which torch does not see. Published figures are one or the other, so all three are returned, and
a layout fits when the last one does.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.hardware.catalogue import Cluster
from meshwright.plan.framework import Framework
from meshwright.plan.memory.block_columns import expert_padding, kept_bytes
from meshwright.plan.memory.formula import formula_items, fp8_weight_items, movable_activation_bytes
from meshwright.plan.memory.in_flight import in_flight
from meshwright.plan.memory.offload import (
    HOST_SHARE,
    Movable,
    move_activations,
    move_states,
    moved_activations,
)
from meshwright.plan.memory.phases import covered_layouts, is_covered, peak_items
from meshwright.plan.memory.rank_parameters import (
    Items,
    RankParameters,
    column,
    rank_parameters,
    state_items,
)
from meshwright.plan.memory.rows import Rank
from meshwright.plan.workload.layouts import Floats, Layouts
from meshwright.plan.workload.workload import OPTIMIZER_BYTES, Workload

GIB = float(2**30)
# CUDA context and lazily loaded kernels; the first collective on a node; each further communicator.
CONTEXT_BYTES = 0.55 * GIB
FIRST_COMMUNICATOR_BYTES = 0.9 * GIB
COMMUNICATOR_BYTES = 0.25 * GIB
FORMULA_WORKSPACE_BYTES = 0.1 * GIB
"""The same where the closed formula is used: other frameworks, whose published rows it was fitted on."""
WORKSPACE_BYTES = 64 * 2**20
"""cuBLAS and cuBLASLt ask torch for 32 MiB each on Hopper: what six measured runs had beside tensors."""
# Part of the short-lived bytes (activations, gathered weights, logits) that the allocator holds beyond need.
FRAGMENTATION = 0.06
# The same where need is known to the byte: 2 to 4% in bench/results/rehearsal_h200_2026-11-15.md.
EXACT_FRAGMENTATION = 0.03
FIT_SHARE = 0.98
STAGES = ("first", "middle", "last")
MANY_LAYOUTS = 1000
"""From so many on, layouts whose state and kept tensors alone do not fit are not priced further."""


@dataclass(frozen=True)
class Memory:
    """Bytes by item; every array has shape (N, 3): first, middle and last pipeline rank."""

    items: Items
    fragmentation: Floats
    """Reserved and not allocated."""
    outside: Items
    """On the device and not torch's: context and communicators."""
    host: Items
    """In host memory, by what `memory.offload` put there."""

    def row(self, index: int) -> "Memory":
        """The memory of one layout."""
        here, num_rows = slice(index, index + 1), len(self.fragmentation)

        def of(items: Items) -> Items:
            return {name: np.broadcast_to(values, (num_rows, 3))[here] for name, values in items.items()}

        return Memory(of(self.items), self.fragmentation[here], of(self.outside), of(self.host))

    @property
    def allocated_bytes(self) -> Floats:
        """Peak of what tensors need, per stage."""
        return _total(self.items)

    @property
    def reserved_bytes(self) -> Floats:
        """Peak of what torch's allocator holds, per stage."""
        return self.allocated_bytes + self.fragmentation

    @property
    def device_bytes(self) -> Floats:
        """Peak of what the process holds on the device, per stage."""
        return self.reserved_bytes + sum(self.outside.values())

    @property
    def peak_allocated_bytes(self) -> Floats:
        """Of the fullest rank, shape (N,)."""
        return self.allocated_bytes.max(axis=1)

    @property
    def peak_reserved_bytes(self) -> Floats:
        """Of the fullest rank, shape (N,)."""
        return self.reserved_bytes.max(axis=1)

    @property
    def peak_device_bytes(self) -> Floats:
        """Of the fullest rank, shape (N,)."""
        return self.device_bytes.max(axis=1)

    @property
    def peak_host_bytes(self) -> Floats:
        """Of the rank that keeps most in host memory, shape (N,)."""
        return _total(self.host).max(axis=1)

    def fits(self, cluster: Cluster) -> NDArray[np.bool_]:
        """Whether the fullest rank stays inside the device with a margin for what the estimate misses, and
        the ranks of a node inside its host memory."""
        here = self.peak_device_bytes <= FIT_SHARE * cluster.device.memory_bytes
        return here & self.fits_host(cluster)

    def fits_host(self, cluster: Cluster) -> NDArray[np.bool_]:
        """Whether what the ranks of a node offload stays inside its host memory."""
        return self.peak_host_bytes * cluster.devices_per_node <= HOST_SHARE * cluster.host_memory_bytes

    @property
    def peak_stage(self) -> NDArray[np.intp]:
        """Which of the three ranks is fullest, shape (N,)."""
        return self.reserved_bytes.argmax(axis=1)


def _total(items: Items) -> Floats:
    return sum(items.values())  # pyright: ignore[reportReturnType]


def memory(work: Workload, at: Layouts, cluster: Cluster, stack: Framework) -> Memory:
    """Price the memory of every layout: by the trace's table where it has the blocks, else by formula."""
    rank = rank_parameters(work, at, stack)
    movable = _movable(work, at, stack, rank)
    state, host = move_states(state_items(work, at, stack, rank), at, movable)
    traced = covered_layouts(at)[:, 0] & is_covered(work, stack)
    if traced.all():
        items = _traced_items(work, at, cluster, stack, rank, state)
    else:
        items = formula_items(work, at, stack, rank, state)
        if traced.any():
            items = _replaced(items, traced, _traced_rows(work, at, stack, traced))
    workspace = np.where(traced, WORKSPACE_BYTES, FORMULA_WORKSPACE_BYTES)
    if work.data_bytes:
        items["batch"] = items.get("batch", 0.0) + np.full((len(at), 3), float(work.data_bytes))
    items["workspace"] = np.repeat(workspace[:, None], 3, axis=1)
    host["activations"] = moved_activations(at, movable)
    move_activations(items, at, movable, is_traced=traced)
    short_lived = items["activations"] + items["gathered"] + items["logits"] + items["working set"]
    exact = traced[:, None]
    if "gradients" in items:
        items["gradients"] = np.where(exact, items["gradients"], stack.gradients_at_the_peak(at, items))
    unused = np.where(exact, EXACT_FRAGMENTATION, FRAGMENTATION) * short_lived
    return Memory(items, unused, outside_bytes(at), host)


def _traced_rows(work: Workload, at: Layouts, stack: Framework, rows: NDArray[np.bool_]) -> Items:
    """The items of some of the layouts."""
    here = at.take(rows)
    rank = rank_parameters(work, here, stack)
    state, _ = move_states(state_items(work, here, stack, rank), here, _movable(work, here, stack, rank))
    return _peak_items(work, here, stack, rank, state)


def _replaced(items: Items, rows: NDArray[np.bool_], new: Items) -> Items:
    """Items in which some rows are others."""
    found: Items = {}
    for name in dict.fromkeys([*items, *new]):
        found[name] = np.array(np.broadcast_to(items.get(name, 0.0), (len(rows), 3)), dtype=np.float64)
        found[name][rows] = new.get(name, 0.0)
    return found


def _traced_items(
    work: Workload, at: Layouts, cluster: Cluster, stack: Framework, rank: RankParameters, state: Items
) -> Items:
    """Items at the peak by the trace's table; of many layouts those that surely do not fit have less."""
    if len(at) < MANY_LAYOUTS:
        return _peak_items(work, at, stack, rank, state)
    stays = 1.0 - column(at.offloads("activations"))
    kept = stays * in_flight(at) * rank.layers * kept_bytes(work, at, stack)
    later = (at.num_microbatches[:, None] > in_flight(at)) & (at.zero < 2)[:, None]
    gradients = np.where(later, state.get("gradients", 0.0), 0.0)
    least = sum(values for name, values in state.items() if name != "gradients") + kept + gradients
    possible = least.max(axis=1) <= cluster.device.memory_bytes
    nothing = dict.fromkeys(("gathered", "working set", "logits", "exchange"), np.zeros((1, 3)))
    bound = {**nothing, **state, "gradients": gradients, "activations": kept}
    return _replaced(bound, possible, _traced_rows(work, at, stack, possible))


def _peak_items(work: Workload, at: Layouts, stack: Framework, rank: RankParameters, state: Items) -> Items:
    """The items of the phase in which a rank holds most."""
    sharded = rank.dense / column(at.shards) + rank.experts * column(stack.expert_share(work, at))
    padding = 0.0 if work.model.moe is None else column(expert_padding(work, at))
    facts = Rank(
        layers=rank.layers,
        last_layers=column(rank.last_layers),
        parameters=rank.dense + rank.experts,
        sharded_parameters=sharded,
        gathered_parameters=rank.dense + padding * rank.experts,
    )
    found = peak_items(work, at, stack, facts, state)
    return {**state, **found, **fp8_weight_items(work, at, rank)}


def host_items(work: Workload, at: Layouts, stack: Framework) -> Items:
    """Bytes in host memory alone, whatever the device; shape (N, 3)."""
    rank = rank_parameters(work, at, stack)
    movable = _movable(work, at, stack, rank)
    _, host = move_states(state_items(work, at, stack, rank), at, movable)
    return {**host, "activations": moved_activations(at, movable)}


def host_peak_bytes(work: Workload, at: Layouts, stack: Framework) -> Floats:
    """In host memory on the rank that keeps most there, shape (N,)."""
    return _total(host_items(work, at, stack)).max(axis=1)


def movable_bytes(work: Workload, at: Layouts, stack: Framework) -> Floats:
    """What one layer keeps of one micro-batch and offload of activations moves, shape (N, 1)."""
    if is_covered(work, stack) and covered_layouts(at).all():
        return kept_bytes(work, at, stack)
    return column(movable_activation_bytes(work, at, stack))


def _movable(work: Workload, at: Layouts, stack: Framework, rank: RankParameters) -> Movable:
    """What of this offload can reach."""
    shards = np.where(at.zero >= 1, at.shards, 1)
    return Movable(
        block_share=rank.layers * rank.layer / (rank.dense + rank.experts),
        layers=rank.layers,
        in_flight=in_flight(at),
        layer_activations=movable_bytes(work, at, stack),
        largest_states=OPTIMIZER_BYTES[work.optimizer] * rank.largest_matrices / column(shards),
    )


def outside_bytes(at: Layouts) -> Items:
    """What the device holds and torch does not see: the context and the communicators."""
    axes = [at.tp > 1, at.dp * at.cp > 1, at.pp > 1, at.cp > 1, at.ep > 1]
    num_axes = np.sum(np.stack([axis.astype(np.float64) for axis in axes]), axis=0)
    communicators = np.where(
        num_axes > 0, FIRST_COMMUNICATOR_BYTES + COMMUNICATOR_BYTES * np.maximum(num_axes - 1, 0), 0.0
    )
    return {
        "context": np.full((len(at), 3), CONTEXT_BYTES),
        "communicators": column(communicators) * np.ones((1, 3)),
    }
