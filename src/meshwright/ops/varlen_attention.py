"""Attention inside segments of flattened rows: separate documents (document masking, varlen).

    out[t,h,:] = sum_u P[h,t,u] v[u,g(h),:]     where u is in t's segment and, with `causal`, not after t

Scores between segments are never computed, and no mask is stored. On CUDA the kernel is torch's flash
attention for 16-bit tensors; elsewhere it is the dense kernel of `attention_aten`, segment by segment. Both
are behind custom ops: a compiled graph neither depends on the segments nor is compiled again for them.

    device  dtypes   head width        kernel
    CUDA    16-bit   multiple of 8     flash, v padded to the width of q (MLA); K and V <= 256
    CPU     any      any               one dense call for each segment
    other cases                        no kernel: `has_varlen` is False, and attention reads a mask
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.flop_counter import register_flop_formula

from meshwright.hardware.simulated_device import SimulatedDevice, kernel_device
from meshwright.ops.attention_aten import Grads, Kernel, SdpaArgs, choose_kernel, masked_score
from meshwright.ops.cast import cast, compute_dtype
from meshwright.ops.documents import Segments
from meshwright.ops.torch_flash_varlen import flash_backward, flash_forward

_HALF = (torch.float16, torch.bfloat16)
_MOST_WIDTH = 256


def has_varlen(q: Tensor, v: Tensor, simulated: SimulatedDevice | None = None) -> bool:
    """Whether attention inside segments has a kernel for these inputs; no host sync."""
    device = kernel_device(q.device.type, simulated)
    if device == "cpu":
        return True
    width, is_aligned = max(q.shape[-1], v.shape[-1]), (q.shape[-1] | v.shape[-1]) % 8 == 0
    return device == "cuda" and compute_dtype(q) in _HALF and width <= _MOST_WIDTH and is_aligned


class _Rule(NamedTuple):
    """What the operators take beside tensors."""

    causal: bool
    window: int | None
    scale: float


def attend_segments(
    q_BSHK: Tensor, k_BTGK: Tensor, v_BTGV: Tensor, segments: Segments, *, scale: float
) -> Tensor:
    """out_BSHV, with gradients to q, k and v. Does not communicate."""
    dtype = compute_dtype(q_BSHK)
    q_THK, k_UGK, v_UGV = (cast(x, dtype).flatten(0, 1) for x in (q_BSHK, k_BTGK, v_BTGV))
    rule = _Rule(segments.causal, segments.window, scale)
    queries, keys, longest = segments[:3]
    # torch's compiler (2.13) skips an autograd function that gets one tensor twice, and the block around it.
    keys = None if keys is queries else keys
    out_THV: Tensor = _VarlenAttention.apply(q_THK, k_UGK, v_UGV, queries, keys, longest, rule)  # pyright: ignore[reportAssignmentType]
    return out_THV.unflatten(0, q_BSHK.shape[:2])


class _VarlenAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        query_offsets: Tensor,
        key_offsets: Tensor | None,
        longest: Tensor,
        rule: _Rule,
    ) -> Tensor:
        out, lse = varlen_forward(q, k, v, _bounds(query_offsets, key_offsets, longest), *rule)
        ctx.save_for_backward(q, k, v, out, lse, query_offsets, key_offsets, longest)
        ctx.rule = rule
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        saved = ctx.saved_tensors
        dq, dk, dv = varlen_backward((grad, *saved[:5]), _bounds(*saved[5:]), *ctx.rule)
        return dq, dk, dv, None, None, None, None


def _bounds(query_offsets: Tensor, key_offsets: Tensor | None, longest: Tensor) -> tuple[Tensor, ...]:
    """What the operators take; no offsets of keys: they are those of the queries."""
    return (query_offsets, query_offsets if key_offsets is None else key_offsets, longest)


@torch.library.custom_op("meshwright::varlen_attention", mutates_args=())
def varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Sequence[Tensor],
    causal: bool,  # noqa: FBT001 - custom ops have no keyword arguments
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """(out_THV, lse_HT); a query without keys has out 0 and the lse of a masked score.

    `bounds` are the offsets of the queries, those of the keys and the length of the longest segment.
    """
    segments = Segments(*bounds, causal, window)  # pyright: ignore[reportCallIssue]
    if not q.is_cuda:
        return _dense_forward(q, k, v, segments, scale)
    out, lse = flash_forward(q, k, _padded(v, q), segments, scale=scale)
    if not causal:
        lse = lse.masked_fill(lse.isinf(), masked_score(lse.dtype))
    return out[..., : v.shape[-1]].contiguous(), lse


@varlen_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    num_rows, num_heads = q.shape[:2]
    lse_dtype = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty((num_rows, num_heads, v.shape[-1])), q.new_empty(
        (num_heads, num_rows), dtype=lse_dtype
    )


@torch.library.custom_op("meshwright::varlen_attention_backward", mutates_args=())
def varlen_backward(
    saved: Sequence[Tensor],
    bounds: Sequence[Tensor],
    causal: bool,  # noqa: FBT001 - custom ops have no keyword arguments
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv). `saved` are the gradient of out, then q, k, v, out and lse.

    out and lse may be those of more keys than these: parts of a merged softmax.
    """
    segments = Segments(*bounds, causal, window)  # pyright: ignore[reportCallIssue]
    grad, q, k, v, out, lse = saved
    if not q.is_cuda:
        return _dense_backward(grad, q, k, v, out, lse, segments, scale)
    grad_out, value, output = (_padded(x, q) for x in (grad, v, out))
    dq, dk, dv = flash_backward(
        grad_out.contiguous(), q, k, value, output.contiguous(), lse.contiguous(), segments, scale=scale
    )
    return dq.contiguous(), dk.contiguous(), dv[..., : v.shape[-1]].contiguous()


@varlen_backward.register_fake
def _(saved: Sequence[Tensor], *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = saved[1:4]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _padded(x: Tensor, like: Tensor) -> Tensor:
    """x padded with zeros to the head width of q, which change neither scores nor the first columns."""
    return x if x.shape[-1] == like.shape[-1] else pad(x, (0, like.shape[-1] - x.shape[-1]))


def _dense_forward(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float
) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    lse = q.new_full((q.shape[1], q.shape[0]), masked_score(dtype), dtype=dtype)
    for queries, keys in _slices(segments):
        args = _segment_args(queries, keys, segments, scale, q)
        kernel = choose_kernel(q, v, has_bias=args.bias_B1ST is not None)
        part, lse_1HS = kernel.forward(*_as_one_sequence(q[queries], k[keys], v[keys]), args)
        out[queries], lse[:, queries] = part[0].transpose(0, 1), lse_1HS[0]
    return out, lse


def _dense_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    segments: Segments,
    scale: float,
) -> Grads:
    dq, dk, dv = (x.new_zeros(x.shape) for x in (q, k, v))
    for queries, keys in _slices(segments):
        args = _segment_args(queries, keys, segments, scale, q)
        kernel = choose_kernel(q, v, has_bias=args.bias_B1ST is not None)
        grad_1, q_1, out_1 = _as_one_sequence(grad[queries], q[queries], out[queries])
        k_1, v_1 = _as_one_sequence(k[keys], v[keys])
        lse_1 = lse[:, queries].unsqueeze(0).contiguous()
        parts = kernel.backward(grad_1, q_1, k_1, v_1, out_1, lse_1, args)
        for total, rows, part in zip((dq, dk, dv), (queries, keys, keys), parts, strict=True):
            total[rows] = part[0].transpose(0, 1)
    return dq, dk, dv


def _slices(segments: Segments) -> Iterator[tuple[slice, slice]]:
    """Query and key rows of each segment that has both. Reads the offsets."""
    bounds = (pairwise(x.tolist()) for x in (segments.query_offsets_P, segments.key_offsets_P))
    for (query, query_end), (key, key_end) in zip(*bounds, strict=True):
        if query < query_end and key < key_end:
            yield slice(query, query_end), slice(key, key_end)


def _segment_args(queries: slice, keys: slice, segments: Segments, scale: float, like: Tensor) -> SdpaArgs:
    num_queries, num_keys = queries.stop - queries.start, keys.stop - keys.start
    window = num_keys if segments.window is None else segments.window
    if not segments.causal:
        return SdpaArgs(scale)
    if num_queries == num_keys <= window:
        return SdpaArgs(scale, causal=True)
    # The last query is at the last key.
    position_S1 = torch.arange(num_keys - num_queries, num_keys, device=like.device).unsqueeze(1)
    distance_ST = position_S1 - torch.arange(num_keys, device=like.device)
    hidden_ST = (distance_ST < 0) | (distance_ST >= window)
    bias_ST = like.new_zeros((num_queries, num_keys)).masked_fill_(hidden_ST, masked_score(like.dtype))
    return SdpaArgs(scale, bias_B1ST=bias_ST[None, None])


def _as_one_sequence(*tensors_THK: Tensor) -> list[Tensor]:
    """x_1HTK of each."""
    return [x.transpose(0, 1).unsqueeze(0) for x in tensors_THK]


def _part_forward(q: Tensor, k: Tensor, v: Tensor, args: SdpaArgs) -> tuple[Tensor, Tensor]:
    segments = args.segments
    assert segments is not None
    flat = (_flat(x) for x in (q, k, v))
    out, lse_HT = varlen_forward(*flat, segments[:3], segments.causal, segments.window, args.scale)
    return _unflat(out, q), lse_HT.unflatten(1, (q.shape[0], -1)).transpose(0, 1)


def _part_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, args: SdpaArgs
) -> Grads:
    segments = args.segments
    assert segments is not None
    saved = (*(_flat(x) for x in (grad, q, k, v, out)), lse.transpose(0, 1).flatten(1))
    dq, dk, dv = varlen_backward(saved, segments[:3], segments.causal, segments.window, args.scale)
    return _unflat(dq, q), _unflat(dk, k), _unflat(dv, v)


def _flat(x_BHSK: Tensor) -> Tensor:
    return x_BHSK.transpose(1, 2).flatten(0, 1)


def _unflat(x_THK: Tensor, like_BHSK: Tensor) -> Tensor:
    return x_THK.unflatten(0, (like_BHSK.shape[0], -1)).transpose(1, 2)


# The same as a kernel of `attention_aten`, for parts of the keys; it reads `SdpaArgs.segments`.
VARLEN = Kernel("varlen", _part_forward, _part_backward)


def _pairs(q: torch.Size, k: torch.Size, bounds: Sequence[torch.Size]) -> int:
    """Query-key pairs of segments of equal lengths, causal or not: shapes do not tell the lengths."""
    return q[0] * k[0] // max(1, bounds[0][0] - 1)


@register_flop_formula(torch.ops.meshwright.varlen_attention)
def _(q: torch.Size, k: torch.Size, v: torch.Size, bounds: Sequence[torch.Size], *_: Any, **__: Any) -> int:
    return 2 * q[1] * _pairs(q, k, bounds) * (q[2] + v[2])


@register_flop_formula(torch.ops.meshwright.varlen_attention_backward)
def _(saved: Sequence[torch.Size], bounds: Sequence[torch.Size], *_: Any, **__: Any) -> int:
    q, k, v = saved[1:4]
    return 2 * q[1] * _pairs(q, k, bounds) * (3 * q[2] + 2 * v[2])


# The forward operator, whose output selective recompute saves.
VARLEN_OPERATORS = (torch.ops.meshwright.varlen_attention.default,)
