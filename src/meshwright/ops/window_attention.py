"""Sliding-window attention as two causal calls of a dense kernel, merged by their log-sum-exps.

With chunks of `window` = W rows, a query at row i of a chunk sees the keys j <= i of its own chunk and the
keys j > i of the chunk before it:

    near   j <= i          causal attention inside each chunk
    far    j >= i + 1      the rows 0 .. W-2 of a chunk against the rows 1 .. W-1 of the chunk before; with
                           both reversed, row W-2-i sees key W-1-j where W-1-j <= W-2-i: causal again

So every pair is computed once, by kernels that have no window, and no mask is stored. Backward needs only the
merged out and lse (see ops/attention.py): it is the sum of both calls' backward.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from meshwright.hardware.simulated_device import SimulatedDevice
from meshwright.ops.attention_aten import CUDNN, Kernel, SdpaArgs, choose_kernel, masked_score
from meshwright.ops.cast import cast, compute_dtype


def has_window_kernel(q: Tensor, v: Tensor, window: int, simulated: SimulatedDevice | None = None) -> bool:
    """Whether two causal calls pay: cuDNN's have no window, and are faster than flash with one (Hopper)."""
    is_even = window > 1 and q.shape[1] % window == 0
    if not is_even or q.dtype != compute_dtype(q):
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
        far_out, far_lse = kernel.forward(*_heads_first(*_far(window, q), *_far_keys(window, k, v)), args)
        shape = (len(q), -1, *near_lse.shape[1:])
        near_BCHW, far_BCHW = near_lse.view(shape), _all_rows(far_lse.view(len(q), -1, *far_lse.shape[1:]), 3)
        share_BCWH1 = torch.sigmoid(far_BCHW - near_BCHW).transpose(2, 3).unsqueeze(-1)
        near_BCWHV = near_out.transpose(1, 2).unflatten(0, (len(q), -1))
        far_BCWHV = _all_rows(far_out.transpose(1, 2).unflatten(0, (len(q), -1)), 2, 0.0)
        merged = torch.lerp(near_BCWHV.to(share_BCWH1.dtype), far_BCWHV.to(share_BCWH1.dtype), share_BCWH1)
        out = cast(merged, q.dtype).flatten(1, 2)
        lse_BSH = torch.logaddexp(near_BCHW, far_BCHW).transpose(2, 3).flatten(1, 2)
        ctx.save_for_backward(q, k, v, out, lse_BSH)
        ctx.window, ctx.scale, ctx.simulated = window, scale, simulated
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, out, lse = ctx.saved_tensors
        window, args = ctx.window, SdpaArgs(ctx.scale, causal=True)
        kernel = choose_kernel(q, v, has_bias=False, simulated=ctx.simulated)
        queries, keys = (grad, q, out, lse), (k, v)
        near = _backward(kernel, _chunks(window, *queries), _chunks(window, *keys), args)
        far = _backward(kernel, _far(window, *queries), _far_keys(window, *keys), args)
        dq, dk, dv = (x.unflatten(0, (len(q), -1)) for x in far)
        rest = (_all_rows(dq, 2, 0.0), _all_keys(dk), _all_keys(dv))
        grads = (
            (part.unflatten(0, (len(q), -1)) + other).flatten(1, 2)
            for part, other in zip(near, rest, strict=True)
        )
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


def _far(window: int, *tensors_BS: Tensor) -> list[Tensor]:
    """x[B (C - 1), W - 1, ...]: all but the last row of every chunk but the first, reversed."""
    return [x.unflatten(1, (-1, window))[:, 1:, :-1].flip(2).flatten(0, 1) for x in tensors_BS]


def _far_keys(window: int, *tensors_BS: Tensor) -> list[Tensor]:
    """x[B (C - 1), W - 1, ...]: all but the first row of every chunk but the last, reversed."""
    return [x.unflatten(1, (-1, window))[:, :-1, 1:].flip(2).flatten(0, 1) for x in tensors_BS]


def _all_rows(far_BC: Tensor, dim: int, value: float | None = None) -> Tensor:
    """The inverse of `_far` along the rows' dim: other rows get `value`, or the score of a masked pair."""
    value = masked_score(far_BC.dtype) if value is None else value
    after = far_BC.ndim - 1 - dim
    sizes = [0, 0] * after + [0, 1] + [0, 0] * (dim - 2) + [1, 0]
    return pad(far_BC.flip(dim), sizes, value=value)


def _all_keys(far_BCWGK: Tensor) -> Tensor:
    """The inverse of `_far_keys`: other rows get 0."""
    return pad(far_BCWGK.flip(2), [0, 0, 0, 0, 1, 0, 0, 1])


def _heads_first(*tensors_BSHK: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in tensors_BSHK]
