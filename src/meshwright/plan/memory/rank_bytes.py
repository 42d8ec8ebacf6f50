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
from meshwright.plan.memory.phases import covered_layouts, forward_items, is_covered, peak_items
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
FIRST_STAGE = np.array([[1.0, 0.0, 0.0]])
MANY_LAYOUTS, MANY_FOR_FORWARD = 1000, 128


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


def memory(
    work: Workload,
    at: Layouts,
    cluster: Cluster,
    stack: Framework,
    *,
    limit: int = MANY_LAYOUTS,
    budget: float = np.inf,
) -> Memory:
    """Price the memory of every layout: by the trace's table where it has the blocks, else by formula.

    A layout that is known to need more than `budget` bytes of the device is not priced further. From `limit`
    layouts on, neither are those whose state and kept tensors alone do not fit. Such a layout has fewer
    allocated bytes here than it needs, and still more than fit.
    """
    rank = rank_parameters(work, at, stack)
    movable = _movable(work, at, stack, rank)
    state, host = move_states(state_items(work, at, stack, rank), at, movable)
    traced = covered_layouts(at)[:, 0] & is_covered(work, stack)
    most = None if np.isinf(budget) else _most_items(at, budget)
    if traced.all():
        items = _bounded_items(work, at, cluster, stack, rank, state, limit=limit, most=most)
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


def _most_items(at: Layouts, budget: float) -> Floats:
    """Bytes that the items of each layout may have, so much more that rounding does not exclude one."""
    return (1.0 + 1e-9) * budget - _total(outside_bytes(at))[:, 0] - WORKSPACE_BYTES


def _traced_rows(work: Workload, at: Layouts, stack: Framework, rows: NDArray[np.bool_]) -> Items:
    """The items of some of the layouts."""
    here = at.take(rows)
    rank, state = _state_of(work, here, stack)
    return _peak_items(work, here, stack, rank, state)


def _state_of(work: Workload, at: Layouts, stack: Framework) -> tuple[RankParameters, Items]:
    """Parameters of the ranks, and their state on the device."""
    rank = rank_parameters(work, at, stack)
    state, _ = move_states(state_items(work, at, stack, rank), at, _movable(work, at, stack, rank))
    return rank, state


def _replaced(items: Items, rows: NDArray[np.bool_], new: Items) -> Items:
    """Items in which some rows are others."""
    found: Items = {}
    for name in dict.fromkeys([*items, *new]):
        found[name] = np.array(np.broadcast_to(items.get(name, 0.0), (len(rows), 3)), dtype=np.float64)
        found[name][rows] = new.get(name, 0.0)
    return found


def _bounded_items(
    work: Workload,
    at: Layouts,
    cluster: Cluster,
    stack: Framework,
    rank: RankParameters,
    state: Items,
    *,
    limit: int,
    most: Floats | None,
) -> Items:
    """Items at the peak by the trace's table; layouts that do not fit may have less (see `memory`)."""
    if len(at) < limit:
        return _items_within(work, at, stack, rank, state, most)
    bound = _kept_items(work, at, stack, rank, state)
    possible = _total(bound).max(axis=1) <= cluster.device.memory_bytes
    here, left = at.take(possible), None if most is None else most[possible]
    rest = _items_within(work, here, stack, *_state_of(work, here, stack), left)
    return _replaced(bound, possible, rest)


def _items_within(
    work: Workload,
    at: Layouts,
    stack: Framework,
    rank: RankParameters,
    state: Items,
    most: Floats | None,
) -> Items:
    """Items at the peak; a layout that holds more than `most` in its forward has those of the forward."""
    if most is None or len(at) < MANY_FOR_FORWARD:
        return _peak_items(work, at, stack, rank, state)
    bound = forward_items(work, at, stack, _facts(work, at, stack, rank), state)
    possible = _total(bound).max(axis=1) <= most
    here = at.take(possible)
    rest = _peak_items(work, here, stack, *_state_of(work, here, stack))
    # In this order their sum is the same to the last bit, whatever is priced beside a layout.
    return _replaced({name: bound.get(name, np.zeros(1)) for name in rest}, possible, rest)


def _kept_items(work: Workload, at: Layouts, stack: Framework, rank: RankParameters, state: Items) -> Items:
    """State and kept tensors, which a rank holds at some phase at the least."""
    stays = 1.0 - column(at.offloads("activations"))
    kept = stays * in_flight(at) * rank.layers * kept_bytes(work, at, stack)
    later = (at.num_microbatches[:, None] > in_flight(at)) & (at.zero < 2)[:, None]
    gradients = np.where(later, state.get("gradients", 0.0), 0.0)
    nothing = dict.fromkeys(("gathered", "working set", "logits", "exchange"), np.zeros((1, 3)))
    return {**nothing, **state, "gradients": gradients, "activations": kept}


def _peak_items(work: Workload, at: Layouts, stack: Framework, rank: RankParameters, state: Items) -> Items:
    """The items of the phase in which a rank holds most."""
    found = peak_items(work, at, stack, _facts(work, at, stack, rank), state)
    return {**state, **found, **fp8_weight_items(work, at, rank)}


def _facts(work: Workload, at: Layouts, stack: Framework, rank: RankParameters) -> Rank:
    """What the phases need to know of the ranks."""
    sharded = rank.dense / column(at.shards) + rank.experts * column(stack.expert_share(work, at))
    padding = 0.0 if work.model.moe is None else column(expert_padding(work, at))
    return Rank(
        layers=rank.layers,
        last_layers=column(rank.last_layers),
        parameters=rank.dense + rank.experts,
        sharded_parameters=sharded,
        gathered_parameters=rank.dense + padding * rank.experts,
    )


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
    is_moved = at.offloads("activations").any()
    return Movable(
        block_share=rank.layers * rank.layer / (rank.dense + rank.experts),
        layers=rank.layers,
        in_flight=in_flight(at),
        layer_activations=movable_bytes(work, at, stack) if is_moved else np.zeros((len(at), 1)),
        largest_states=OPTIMIZER_BYTES[work.optimizer] * rank.largest_matrices / column(shards),
        embedding=np.where(column(at.pp) == 1, 1.0, FIRST_STAGE) * embedding_bytes(work, stack),
    )


def embedding_bytes(work: Workload, stack: Framework) -> float:
    """Bytes of the unsharded token table; beside a packed base it is in 16 bits."""
    frozen = work.adapters
    each = stack.state.weight if frozen is None else 4.0 if frozen.has_fp32_tables else 2.0
    return each * work.counts.embedding


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
