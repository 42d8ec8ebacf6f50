"""Attention kernels that also return the log-sum-exp, each with its backward, and a plain one.

The public `scaled_dot_product_attention` does not return the log-sum-exp, and without it neither the parts of
a softmax can be merged nor its backward run part by part. The private aten operators
(`_scaled_dot_product_*`) return it. All calls of them in the attention of ours are in this file, behind one
pair of functions.

The layout here is that of the operators: q_BHSK, k_BGTK, v_BGTV, lse_BHS; G divides H; `causal` requires S =
T.

    kernel     device  dtypes            bias  width of v
    flash_cpu  CPU     fp64 fp32 16-bit  yes   padded to K
    cudnn      CUDA    16-bit            yes   any           (Hopper and newer, K and V <= 256)
    flash      CUDA    16-bit            no    padded to K   (K <= 256)
    efficient  CUDA    fp32 16-bit       yes   any           (key heads repeated)
    plain      any     any               yes   any           (holds all S x T scores)
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from meshwright.hardware.simulated_device import SimulatedDevice, kernel_device
from meshwright.ops.documents import Segments

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_FAST_CUDNN_SINCE = (9, 0)
# The efficient kernel reads the log-sum-exp in groups of this many rows.
_EFFICIENT_LSE_ROWS = 32

Grads = tuple[Tensor, Tensor, Tensor]


def masked_score(dtype: torch.dtype) -> float:
    """The score of a masked pair.

    It is finite: a row that sees nothing in a part then has this as its log-sum-exp and weighs exactly 0 in
    the merge. With -inf the kernels disagree (the CPU one returns 0, others nan).
    """
    return torch.finfo(dtype).min / 2


class SdpaArgs(NamedTuple):
    """How scores become weights: a scale, then a causal mask, an additive bias, segments, or nothing."""

    scale: float
    causal: bool = False
    bias_B1ST: Tensor | None = None
    segments: Segments | None = None
    """For the kernel of `varlen_attention` alone."""


class Kernel(NamedTuple):
    """forward(q, k, v, args) -> (out, lse); backward(grad_out, q, k, v, out, lse, args) -> (dq, dk, dv)."""

    name: str
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., Grads]


def choose_kernel(
    q: Tensor, v: Tensor, *, has_bias: bool, simulated: SimulatedDevice | None = None
) -> Kernel:
    """The fastest kernel for these inputs, by device, dtype and head width; no host sync."""
    width = max(q.shape[-1], v.shape[-1])
    device = kernel_device(q.device.type, simulated)
    if device == "cpu":
        return FLASH_CPU
    if device != "cuda" or q.dtype not in (*_HALF, torch.float32) or (q.shape[-1] | v.shape[-1]) % 8:
        return PLAIN
    if q.dtype == torch.float32 or width > 256:
        return EFFICIENT
    if _has_fast_cudnn(q.device, simulated):
        return CUDNN
    return EFFICIENT if has_bias else FLASH


def _has_fast_cudnn(device: torch.device, simulated: SimulatedDevice | None) -> bool:
    """From Hopper on, cuDNN attention is the faster kernel."""
    if simulated is not None:
        return simulated.capability >= _FAST_CUDNN_SINCE
    return torch.cuda.is_available() and torch.cuda.get_device_capability(device) >= _FAST_CUDNN_SINCE


def _pad_width(x: Tensor, width: int) -> Tensor:
    """x padded with zeros, which change neither the scores nor the first columns of the output."""
    return x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1]))


def _pad_all(*tensors: Tensor) -> list[Tensor]:
    width = max(x.shape[-1] for x in tensors)
    return [_pad_width(x, width) for x in tensors]


def _trim(grads: tuple[Tensor, ...], q: Tensor, v: Tensor) -> Grads:
    dq, dk, dv = grads
    return dq[..., : q.shape[-1]], dk[..., : q.shape[-1]], dv[..., : v.shape[-1]]


def _flash_cpu_forward(q: Tensor, k: Tensor, v: Tensor, args: SdpaArgs) -> tuple[Tensor, Tensor]:
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
        *_pad_all(q, k, v), 0.0, args.causal, attn_mask=args.bias_B1ST, scale=args.scale
    )
    return out[..., : v.shape[-1]], lse


def _flash_cpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, args: SdpaArgs
) -> Grads:
    qp, kp, vp, gradp, outp = _pad_all(q, k, v, grad, out)
    grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradp, qp, kp, vp, outp, lse, 0.0, args.causal, attn_mask=args.bias_B1ST, scale=args.scale
    )
    return _trim(grads, q, v)


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, args: SdpaArgs) -> tuple[Tensor, Tensor]:
    out, lse, *_ = _aten._scaled_dot_product_flash_attention(
        *_pad_all(q, k, v), 0.0, args.causal, False, scale=args.scale
    )
    return out[..., : v.shape[-1]], lse


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, args: SdpaArgs
) -> Grads:
    qp, kp, vp, gradp, outp = _pad_all(q, k, v, grad, out)
    # Seed and offset of dropout, which is always 0 here.
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
    offset = torch.zeros((), dtype=torch.uint64, device=q.device)
    sizes = (None, None, q.shape[2], k.shape[2])
    grads = _aten._scaled_dot_product_flash_attention_backward(
        gradp, qp, kp, vp, outp, lse, *sizes, 0.0, args.causal, seed, offset, scale=args.scale
    )
    return _trim(grads, q, v)


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, args: SdpaArgs) -> tuple[Tensor, Tensor]:
    out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
        q, k, v, args.bias_B1ST, True, 0.0, args.causal, False, scale=args.scale
    )
    return out, lse.reshape(q.shape[:3])


def _cudnn_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, args: SdpaArgs
) -> Grads:
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    sizes = (None, None, q.shape[2], k.shape[2])
    return _aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, lse.unsqueeze(-1), seed, seed, args.bias_B1ST, *sizes, 0.0, args.causal,
        scale=args.scale,
    )  # fmt: skip


def _repeat_heads(x_BGTK: Tensor, num_heads: int) -> Tensor:
    return x_BGTK.repeat_interleave(num_heads // x_BGTK.shape[1], dim=1)


def _align_bias(args: SdpaArgs, num_heads: int) -> Tensor | None:
    """The bias in the form of the efficient kernel: one per head, with rows aligned to 16 elements."""
    bias = args.bias_B1ST
    if bias is None:
        return None
    length = bias.shape[-1]
    return pad(bias, (0, -length % 16))[..., :length].expand(-1, num_heads, -1, -1)


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor, args: SdpaArgs) -> tuple[Tensor, Tensor]:
    heads = q.shape[1]
    out, lse, *_ = _aten._scaled_dot_product_efficient_attention(
        q, _repeat_heads(k, heads), _repeat_heads(v, heads), _align_bias(args, heads), True, 0.0, args.causal,
        scale=args.scale,
    )  # fmt: skip
    return out, lse[..., : q.shape[2]]


def _efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, args: SdpaArgs
) -> Grads:
    heads, groups = q.shape[1], k.shape[1]
    # In 16 bits this backward ignores the strides of `out` and reads its rows as dense.
    grad, out = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (grad, out))
    # Rows beyond the last query must weigh nothing: exp(score - infinity) = 0.
    lse = pad(lse, (0, -q.shape[2] % _EFFICIENT_LSE_ROWS), value=float("inf"))
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
        grad, q, _repeat_heads(k, heads), _repeat_heads(v, heads), _align_bias(args, heads), out, lse,
        seed, seed, 0.0, [True, True, True, False], args.causal, scale=args.scale,
    )  # fmt: skip
    return dq, dk.unflatten(1, (groups, -1)).sum(2), dv.unflatten(1, (groups, -1)).sum(2)


def _plain_scores(q: Tensor, k: Tensor, args: SdpaArgs) -> Tensor:
    """scores_BGRST in fp32 or fp64; R query heads share one of the G key heads."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    q_BGRSK = q.unflatten(1, (k.shape[1], -1)).to(dtype)
    scores = torch.einsum("bgrsk,bgtk->bgrst", q_BGRSK, k.to(dtype)) * args.scale
    if args.bias_B1ST is not None:
        scores = scores + args.bias_B1ST.unsqueeze(1)
    if args.causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    return scores


def _plain_forward(q: Tensor, k: Tensor, v: Tensor, args: SdpaArgs) -> tuple[Tensor, Tensor]:
    scores = _plain_scores(q, k, args)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.unsqueeze(-1))
    out = torch.einsum("bgrst,bgtv->bgrsv", weights, v.to(weights.dtype))
    return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)


def _plain_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, args: SdpaArgs
) -> Grads:
    """dV = P^T dO; dS = P * (dO V^T - rowsum(dO * O)); dQ = dS K; dK = dS^T Q."""
    groups = k.shape[1]
    scores = _plain_scores(q, k, args)
    dtype = scores.dtype
    weights = torch.exp(scores - lse.unflatten(1, (groups, -1)).unsqueeze(-1).to(dtype))
    grad_BGRSV = grad.unflatten(1, (groups, -1)).to(dtype)
    delta = (grad_BGRSV * out.unflatten(1, (groups, -1)).to(dtype)).sum(-1, keepdim=True)
    dscores = weights * (torch.einsum("bgrsv,bgtv->bgrst", grad_BGRSV, v.to(dtype)) - delta) * args.scale
    dq = torch.einsum("bgrst,bgtk->bgrsk", dscores, k.to(dtype)).flatten(1, 2)
    dk = torch.einsum("bgrst,bgrsk->bgtk", dscores, q.unflatten(1, (groups, -1)).to(dtype))
    dv = torch.einsum("bgrst,bgrsv->bgtv", weights, grad_BGRSV)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


FLASH_CPU = Kernel("flash_cpu", _flash_cpu_forward, _flash_cpu_backward)
FLASH = Kernel("flash", _flash_forward, _flash_backward)
CUDNN = Kernel("cudnn", _cudnn_forward, _cudnn_backward)
EFFICIENT = Kernel("efficient", _efficient_forward, _efficient_backward)
PLAIN = Kernel("plain", _plain_forward, _plain_backward)
