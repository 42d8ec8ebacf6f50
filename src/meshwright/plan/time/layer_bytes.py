"""Parameters of one layer on one rank, and the bytes that weights and adapters move beside its matmuls."""

import numpy as np

from meshwright.plan.time.pass_time import Context
from meshwright.plan.workload.layouts import Floats
from meshwright.plan.workload.operators import Matmul

# DoRA reads a weight in 16 bits, writes it in fp32, and reads that for its norms and for W A^T.
DORA_NORM_BYTES = 2.0 + 4.0 + 4.0 + 4.0


def layer_elements(ctx: Context, *, moe: bool) -> tuple[Floats, Floats]:
    """Parameters of one layer on one rank before any sharding by ZeRO: dense part and routed experts."""
    counts, at = ctx.workload.counts, ctx.at
    matrices = counts.moe_layer if moe else counts.dense_layer
    dense = matrices / at.tp + counts.replicated_layer + (counts.router_layer if moe else 0)
    experts = counts.experts_layer / (at.ep * at.etp) if moe else np.zeros(len(at))
    return dense, experts


def dequantise_bytes(ctx: Context, *, moe: bool) -> Floats:
    """Bytes moved to dequantise a layer's frozen 4-bit weights for one pass; fp8 matmuls read the 8 bits."""
    adapters = ctx.workload.adapters
    is_packed = adapters is not None and (adapters.base_bits < 16 or adapters.packed_bits is not None)
    if adapters is None or not is_packed or ctx.workload.is_low_precision:
        return np.zeros(len(ctx.at))
    dense, experts = layer_elements(ctx, moe=moe)
    return (adapters.base_bits / 8.0 + ctx.workload.working_bytes) * (dense + experts)


def adapter_bytes(ctx: Context, matmuls: list[Matmul]) -> tuple[Floats, Floats]:
    """Bytes that adapters beside these matmuls move, forward and backward: rank-wide matmuls read and write
    the inputs and outputs of their linear once more. Dropout reads and writes inputs, and in backward inputs
    and their gradients. DoRA scales outputs; in backward it scales their gradients and sums those of the
    magnitudes."""
    zero, adapters = np.zeros(len(ctx.at)), ctx.workload.adapters
    if adapters is None or not ctx.framework.is_traced:
        return zero, zero
    linears = [one for one in matmuls if one.name != "router"]
    dropped, scaled = (2.0 if adapters.has_dropout else 0.0), (2.0 if adapters.is_dora else 0.0)
    forward = sum(
        (one.groups * one.m * ((1.0 + dropped) * one.k + (2.0 + scaled) * one.n) for one in linears), zero
    )
    backward = sum(
        (
            one.groups * one.m * ((3.0 + 2.0 * dropped) * one.k + (2.0 + 2.0 * scaled) * one.n)
            for one in linears
        ),
        zero,
    )
    width = ctx.workload.working_bytes
    return width * forward, width * backward


def weight_bytes(ctx: Context, *, moe: bool) -> tuple[Floats, Floats]:
    """Bytes moved to cast a layer's weights (forward), and to cast and accumulate gradients (backward).

    Frozen weights have neither; DoRA takes their norms in forward.
    """
    adapters = ctx.workload.adapters
    dense, experts = layer_elements(ctx, moe=moe)
    if adapters is not None:
        norms = DORA_NORM_BYTES if adapters.is_dora else 0.0
        return norms * (dense + experts), np.zeros(len(ctx.at))
    cast, accumulated = ctx.framework.weight_cast_rates(ctx.workload, ctx.at.num_microbatches)
    return cast * (dense + experts), accumulated * (dense + experts)
