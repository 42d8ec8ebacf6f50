"""Sliding-window attention as two causal calls of a dense kernel, merged by their log-sum-exps.

With chunks of `window` = W rows, a query at row i of a chunk sees the keys j <= i of its own chunk and the
keys j > i of the chunk before it:

    near   j <= i          causal attention inside each chunk
    far    j >= i + 1      with queries in the order W-2, ..., 0, W-1 and keys in the order W-1, ..., 0, row
                           W-2-i sees key W-1-j where W-1-j <= W-2-i: causal again

The last query of a chunk sees no far key; its row stands last, where it hides nothing, and weighs 0. So every
pair is computed once, by kernels that have no window, and no mask is stored. Backward needs only the merged
out and lse (see ops/attention.py): it is the sum of both calls' backward.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from meshwright.hardware.simulated_device import SimulatedDevice
from meshwright.ops.attention_aten import CUDNN, Kernel, SdpaArgs, choose_kernel, masked_score
from meshwright.ops.cast import cast, compute_dtype

# Rows of a chunk are a multiple of this many: the compiler pads odd sizes, and kernels read them as dense.
ALIGN = 64
# The log-sum-exp of a row that gets no gradient: its weights exp(score - lse) are 0.
_NO_WEIGHT = 1e30


def has_window_kernel(q: Tensor, v: Tensor, window: int, simulated: SimulatedDevice | None = None) -> bool:
    """Whether two causal calls pay: cuDNN's have no window, and are faster than flash with one (Hopper).

    Only in a compiled graph, which fuses the reordering of rows and the merge: uncompiled, they take more
    memory and half of the gain.
    """
    is_even = window % ALIGN == 0 and q.shape[1] % window == 0
    if not is_even or q.dtype != compute_dtype(q) or not torch.compiler.is_compiling():
        return False
    return choose_kernel(q, v, has_bias=False, simulated=simulated) is CUDNN


def attend_window(
    q_BSHK: Tensor,
    k_BSGK: Tensor,
    v_BSGV: Tensor,
    *,
    window: int,
    scale: float,
    simulated: SimulatedDevice | None = None,
) -> Tensor:
    """out_BSHV, with gradients to q, k and v; the window divides S."""
    inputs = (cast(x, q_BSHK.dtype) for x in (q_BSHK, k_BSGK, v_BSGV))
    return _WindowAttention.apply(*inputs, window, scale, simulated)  # pyright: ignore[reportReturnType]


class _WindowAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: int,
        scale: float,
        simulated: SimulatedDevice | None,
    ) -> Tensor:
        args, kernel = SdpaArgs(scale, causal=True), choose_kernel(q, v, has_bias=False, simulated=simulated)
        near_out, near_lse = kernel.forward(*_heads_first(*_chunks(window, q, k, v)), args)
        far_out, far_lse = kernel.forward(
            *_heads_first(_far_queries(window, q), *_far_keys(window, k, v)), args
        )
        near, near_lse = _rows_first(near_out, near_lse, len(q))
        far, far_lse = (_in_order(x) for x in _rows_first(far_out, far_lse, len(q)))
        far_lse = _without_last(far_lse, masked_score(far_lse.dtype))
        # The first chunk has no far keys.
        far, far_lse = _after_first(far, 0.0), _after_first(far_lse, masked_score(far_lse.dtype))
        share = torch.sigmoid(far_lse - near_lse).unsqueeze(-1)
        merged = torch.lerp(near.to(share.dtype), far.to(share.dtype), share)
        out, lse_BSH = cast(merged, q.dtype).flatten(1, 2), torch.logaddexp(near_lse, far_lse).flatten(1, 2)
        ctx.save_for_backward(q, k, v, out, lse_BSH)
        ctx.window, ctx.scale, ctx.simulated = window, scale, simulated
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, out, lse = ctx.saved_tensors
        window, args = ctx.window, SdpaArgs(ctx.scale, causal=True)
        kernel = choose_kernel(q, v, has_bias=False, simulated=ctx.simulated)
        near = _backward(kernel, _chunks(window, grad, q, out, lse), _chunks(window, k, v), args)
        *far_queries, far_lse = (_far_queries(window, x) for x in (grad, q, out, lse))
        far_queries = [*far_queries, _without_last(far_lse, _NO_WEIGHT, dim=1)]
        dq, dk, dv = _backward(kernel, far_queries, _far_keys(window, k, v), args)
        far = (_after_first(_in_order(_by_chunk(dq, q))), *(_before_last(_by_chunk(x, q)) for x in (dk, dv)))
        grads = ((_by_chunk(one, q) + other).flatten(1, 2) for one, other in zip(near, far, strict=True))
        return *grads, None, None, None


def _backward(kernel: Kernel, queries: list[Tensor], keys: list[Tensor], args: SdpaArgs) -> list[Tensor]:
    """dq, dk and dv with rows before heads."""
    grad, q, out = _heads_first(*queries[:3])
    lse_BHW = queries[3].transpose(1, 2).contiguous()
    k, v = _heads_first(*keys)
    return [x.transpose(1, 2) for x in kernel.backward(grad, q, k, v, out, lse_BHW, args)]


def _chunks(window: int, *tensors_BS: Tensor) -> list[Tensor]:
    """x[B C, W, ...]: the chunks of each sequence."""
    return [x.unflatten(1, (-1, window)).flatten(0, 1) for x in tensors_BS]


def _far_queries(window: int, x_BS: Tensor) -> Tensor:
    """x[B (C - 1), W, ...]: every chunk but the first, its rows in the order W-2, ..., 0, W-1."""
    return x_BS.unflatten(1, (-1, window))[:, 1:].flip(2).roll(-1, 2).flatten(0, 1)


def _far_keys(window: int, *tensors_BS: Tensor) -> list[Tensor]:
    """x[B (C - 1), W, ...]: every chunk but the last, its rows in the order W-1, ..., 0."""
    return [x.unflatten(1, (-1, window))[:, :-1].flip(2).flatten(0, 1) for x in tensors_BS]


def _rows_first(out_NHWV: Tensor, lse_NHW: Tensor, num_sequences: int) -> list[Tensor]:
    """out_BCWHV and lse_BCWH."""
    return [x.transpose(1, 2).unflatten(0, (num_sequences, -1)) for x in (out_NHWV, lse_NHW)]


def _by_chunk(x_NW: Tensor, q_BS: Tensor) -> Tensor:
    return x_NW.unflatten(0, (len(q_BS), -1))


def _in_order(far_BCW: Tensor) -> Tensor:
    """The rows of `_far_queries` in their order in a chunk."""
    return far_BCW.roll(1, 2).flip(2)


def _without_last(x: Tensor, value: float, dim: int = 2) -> Tensor:
    """x with its last row set to `value`."""
    index = torch.arange(x.shape[dim], device=x.device)
    is_last = (index == x.shape[dim] - 1).view(-1, *[1] * (x.ndim - 1 - dim))
    return x.masked_fill(is_last, value)


def _after_first(far_BC: Tensor, value: float = 0.0) -> Tensor:
    """All chunks: the first one is `value`."""
    return pad(far_BC, [0, 0] * (far_BC.ndim - 2) + [1, 0], value=value)


def _before_last(far_BCWGK: Tensor) -> Tensor:
    """All chunks of keys, from the reversed rows of all but the last, which is 0."""
    return pad(far_BCWGK.flip(2), [0, 0] * 3 + [0, 1])


def _heads_first(*tensors_BSHK: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in tensors_BSHK]
