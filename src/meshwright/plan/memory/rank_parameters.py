"""Parameters of the first, the second and the last pipeline rank, and the state that ZeRO leaves of them."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshwright.plan.framework import Framework
from meshwright.plan.workload.layouts import Floats, Layouts
from meshwright.plan.workload.schedules import SCHEDULES
from meshwright.plan.workload.workload import OPTIMIZER_BYTES, Workload
from meshwright.spec.stages import V_SCHEDULES

Items = dict[str, Floats]


def column(values: ArrayLike) -> Floats:
    """One value for each layout, as a column of shape (N, 1)."""
    return np.atleast_1d(np.asarray(values, dtype=np.float64))[:, None]


@dataclass(frozen=True)
class RankParameters:
    """Parameters of each of the three ranks before ZeRO divides anything, shape (N, 3)."""

    dense: Floats
    experts: Floats
    layers: Floats
    last_layers: Floats
    """Layers of the model's last stage, shape (N,)."""
    layer: Floats
    """Of the mean layer."""
    largest_unit: Floats
    """Of what ZeRO-3 gathers at once; weights of a packed base count as the share of their bits."""
    largest_matrices: Floats
    """The largest tensor and the largest of a layer, which may follow it."""


def rank_parameters(work: Workload, at: Layouts, stack: Framework) -> RankParameters:
    """Parameters of the three ranks of every layout."""
    counts = work.counts
    split = stack.stage_layers(work, at)
    layers = np.stack([split.first, split.most, split.last], axis=1)
    alone = (at.pp == 1)[:, None]
    moe_share = counts.num_moe_layers / work.model.num_layers
    matrices = (1.0 - moe_share) * counts.dense_layer + moe_share * counts.moe_layer
    per_layer = column(matrices / at.tp + counts.replicated_layer + moe_share * counts.router_layer)
    experts = column(moe_share * counts.experts_layer / (at.ep * at.etp))
    table, head = column(counts.embedding / at.tp), column((counts.head or counts.embedding) / at.tp)
    none = np.zeros_like(table)
    ends = np.where(
        is_v_shaped(at)[:, None],
        np.concatenate([table + head, none, none], axis=1),
        np.concatenate([table, none, head], axis=1),
    )
    both = column((counts.embedding + counts.head) / at.tp)
    dense = layers * per_layer + np.where(alone, both, ends)
    # Experts that lie whole on their rank are never gathered.
    gathered = np.where(column(stack.expert_shards(at)) > 1, experts, 0.0)
    packed = _packed_share(work, stack)
    unit = np.maximum(
        packed * (per_layer + gathered), np.where(alone, column(counts.embedding / at.tp), ends)
    )
    inner = work.model.width * work.model.mlp.width / at.tp
    matrix = np.maximum(column(inner), experts / 3.0)
    largest = np.maximum(np.where(alone, column(counts.embedding / at.tp), ends), matrix) + matrix
    return RankParameters(
        dense, layers * experts, layers, split.last_stage, per_layer + experts, unit, largest
    )


def _packed_share(work: Workload, stack: Framework) -> float:
    """Bits of a block's weight that is gathered, over those of one that is not packed."""
    packed_bits = work.adapters.packed_bits if work.adapters is not None else None
    return 1.0 if packed_bits is None else packed_bits / 8.0 / stack.state.gather


def state_items(work: Workload, at: Layouts, stack: Framework, rank: RankParameters) -> Items:
    """Weights, gradients, master and optimizer states as the ZeRO stage divides them."""
    shards = column(at.shards.astype(np.float64))
    share = column(stack.expert_share(work, at))
    zero = at.zero[:, None]
    # ZeRO-3 in a pipeline keeps them beside the gathered weights: there they are counted.
    whole = ((at.reduce_last == 1) & ((at.pp == 1) | (at.zero == 2)))[:, None]

    def held(bytes_each: float, from_stage: int) -> Floats:
        divided = (zero >= from_stage) & ~(whole & (from_stage == 2))
        return (
            (2.0 if work.precision == "fp64" else 1.0)
            * bytes_each
            * (rank.dense / np.where(divided, shards, 1.0) + rank.experts * np.where(divided, share, 1.0))
        )

    state = stack.state
    if work.adapters is not None:
        trained = work.adapters.share(work.model.width)
        # Peers keep statistics and norms beside the base; ours is counted exactly.
        frozen = (1.0 - work.adapters.full_share) * work.adapters.base_bits / 8.0
        base = held(frozen * (1.0 if stack.is_traced else 1.03), 3)
        return {"weights": base, "adapters": trained * held(_adapter_state_bytes(work, stack), 3)}
    return {
        "weights": held(state.weight, 3),
        "gradients": held(state.gradient, 2),
        "master": held(state.master, 1),
        "optimizer": held(OPTIMIZER_BYTES[work.optimizer], 1),
    }


def _adapter_state_bytes(work: Workload, stack: Framework) -> float:
    """Bytes of a trained parameter: weight, gradient, master copy and moments."""
    state = stack.state
    return state.weight + state.gradient + state.master + OPTIMIZER_BYTES[work.optimizer]


def is_v_shaped(at: Layouts) -> NDArray[np.bool_]:
    """Where the second half of the stages runs back through the ranks: the first has both ends."""
    indices = [index for index, name in enumerate(SCHEDULES) if name in V_SCHEDULES]
    return (at.pp > 1) & np.isin(at.schedule, indices)
