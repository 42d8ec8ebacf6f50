"""Bytes of the tensors of one block and one micro-batch on one rank, for block_tape.py."""

from dataclasses import dataclass

import numpy as np

from meshwright.plan.framework import Framework
from meshwright.plan.workload.layouts import CP_KINDS, Floats, Layouts
from meshwright.plan.workload.workload import Workload

MOST_BAND_ROWS = 2048
"""Queries of one call that reads a mask, over cp."""


@dataclass(frozen=True)
class MaskSizes:
    """Bytes of what says who sees whom, as one byte a pair; all 0 where attention needs no mask."""

    whole: Floats
    """Of all rows and keys, where one call sees the whole sequence."""
    making: Floats
    """Held at the fullest moment while it is made: distances in int64, and parts of the mask."""
    band: Floats
    """Of one call over cp, which sees a chunk of the queries and one of the keys."""
    calls: Floats
    """Over cp: such calls, each for half of this rank's queries."""


@dataclass(frozen=True)
class RoutedSizes:
    """Bytes of the tensors of routed experts, for routed_tape.py; every array has shape (M,)."""

    n: Floats
    g: Floats
    e: Floats
    order: Floats
    """Row numbers and experts of all choices, int64."""
    is_dealt: Floats
    """1 where ep sends rows to other ranks."""
    has_shared: bool


@dataclass(frozen=True)
class Sizes:
    """Bytes of the tensors of one block and one micro-batch; every array has shape (M,)."""

    x: Floats
    X: Floats
    q: Floats
    k: Floats
    f: Floats
    lse: Floats
    weights: dict[str, Floats]
    """Elements of each matrix on this rank, in the order of the module."""
    is_cut: Floats
    """1 where tp gathers and scatters."""
    is_spread: Floats
    """1 where the parts of tp do not lie one after the other, so that collectives copy."""
    gathers: Floats
    """cp where it gathers keys and values, else 0."""
    swaps: Floats
    """1 where cp trades rows for heads, at least among neighbours."""
    rings: Floats
    """Ranks of the ring that keys travel, else 0."""
    mask: MaskSizes
    routed: RoutedSizes | None
    is_gated: bool
    has_head_norms: bool
    accumulates: Floats
    """1 where gradients are there already: new ones are added to them and let go of."""
    flats: dict[str, Floats]
    """Bytes of the flat buffer that the gradient of a matrix completes."""
    work: Workload
    at: Layouts
    stack: Framework

    @property
    def elements(self) -> Floats:
        """Of all matrices."""
        return sum(self.weights.values())  # pyright: ignore[reportReturnType]

    @property
    def gathered_elements(self) -> Floats:
        """Of all that ZeRO-3 gathers."""
        if self.work.model.moe is None:
            return self.elements
        experts = sum(size for name, size in self.weights.items() if name.startswith("experts."))
        return self.elements + (expert_padding(self.work, self.at) - 1.0) * experts


def expert_padding(work: Workload, at: Layouts) -> Floats:
    """Gathered elements of experts over those on a rank: each rank's part is padded to whole experts.

    Where ep deals them out FSDP2 gathers them by themselves; that is not written down here.
    """
    moe = work.model.moe
    assert moe is not None
    each = np.ceil(moe.num_experts / at.shards)
    return np.where(at.ep > 1, 1.0, each * at.shards / moe.num_experts)


def sizes_of(
    work: Workload, at: Layouts, stack: Framework, accumulates: Floats, flats: dict[str, Floats]
) -> Sizes:
    """Of one block."""
    model, tp = work.model, at.tp.astype(np.float64)
    attention = model.attention
    tokens = at.microbatch_tokens(work.sequence_length)
    wide = tokens * model.width * work.working_bytes
    heads, groups = (
        tokens * count * attention.head_width * work.working_bytes / tp
        for count in (attention.num_heads, attention.num_kv_heads)
    )
    kind = np.asarray(CP_KINDS)[at.cp_kind]
    across = np.where(kind == "hierarchical", at.cp / np.maximum(at.cp_inner, 1), 0.0)
    return Sizes(
        x=wide / tp,
        X=wide,
        q=heads,
        k=groups,
        f=tokens * _inner_width(work) * work.working_bytes / tp,
        lse=4.0 * tokens * attention.num_heads / tp,
        weights=_matrices(work, tp, at.ep.astype(np.float64)),
        is_cut=(at.tp > 1).astype(np.float64),
        is_spread=((at.tp > 1) & (at.microbatch_sequences > 1)).astype(np.float64),
        gathers=np.where((at.cp > 1) & (kind == "gather"), at.cp, 0.0),
        swaps=((at.cp > 1) & np.isin(kind, ("ulysses", "hierarchical"))).astype(np.float64),
        rings=np.where(at.cp > 1, np.where(kind == "ring", at.cp, across), 0.0),
        mask=_mask_sizes(work, at),
        routed=_routed_sizes(work, at),
        is_gated=model.moe is not None or model.mlp.num_matrices == 3,
        has_head_norms=attention.qk_norm,
        accumulates=accumulates,
        flats=flats,
        work=work,
        at=at,
        stack=stack,
    )


def _mask_sizes(work: Workload, at: Layouts) -> MaskSizes:
    if not work.has_mask:
        none = np.zeros(len(at))
        return MaskSizes(none, none, none, none)
    length = float(work.sequence_length)
    kind = np.asarray(CP_KINDS)[at.cp_kind]
    is_whole = (at.cp == 1) | (kind == "ulysses")
    sequences = at.microbatch_sequences.astype(np.float64)
    pairs = np.where(is_whole, length**2, 0.0)
    whole = pairs * (sequences if work.separate_documents else 1.0)
    rings = np.where(kind == "hierarchical", at.cp // np.maximum(at.cp_inner, 1), at.cp)
    chunk = length / (2.0 * rings)
    band = sequences * np.minimum(chunk, MOST_BAND_ROWS) * chunk
    window = work.model.attention.window or length
    reach = np.ceil((window - 1.0) / chunk)  # chunks back that are seen; the last rank has two neighbours
    calls = np.minimum(rings - 1.0, reach) + np.minimum(rings, reach) + 2.0
    return MaskSizes(whole, 9.0 * pairs + 2.0 * whole, np.where(is_whole, 0.0, band), calls)


def _inner_width(work: Workload) -> int:
    """Of the dense MLP, or of the shared expert."""
    return work.model.mlp.width if work.model.moe is None else work.model.moe.shared_width


def _routed_sizes(work: Workload, at: Layouts) -> RoutedSizes | None:
    moe = work.model.moe
    if moe is None:
        return None
    tokens = at.microbatch_tokens(work.sequence_length) / at.tp
    rows = tokens * moe.top_k
    return RoutedSizes(
        n=rows * work.model.width * work.working_bytes,
        g=rows * moe.width * work.working_bytes,
        e=4.0 * tokens * moe.num_experts,
        order=3.0 * 8.0 * tokens * moe.top_k,
        is_dealt=(at.ep > 1).astype(np.float64),
        has_shared=moe.shared_width > 0,
    )


def _matrices(work: Workload, tp: Floats, ep: Floats) -> dict[str, Floats]:
    """Elements of matrices on this rank, in the order of the module."""
    model = work.model
    attention = model.attention
    queries = attention.num_heads * attention.head_width * model.width / tp
    keys = attention.num_kv_heads * attention.head_width * model.width / tp
    found = {"query": queries, "key": keys, "value": keys, "output": queries}
    if model.moe is not None:
        each = model.moe.num_experts * model.moe.width * model.width / ep
        found |= {f"experts.{name}": each + 0.0 * tp for name in ("gate", "up", "down")}
    inner = _inner_width(work) * model.width / tp
    names = ("gate", "up", "down") if model.moe is not None or model.mlp.num_matrices == 3 else ("up", "down")
    return found | dict.fromkeys(names if _inner_width(work) else (), inner)
