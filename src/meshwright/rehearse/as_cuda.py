"""Make torch's own functions choose on the CPU what they choose on CUDA.

A tensor of CUDA type without a CUDA build aborts the process in autograd, so the rehearsal's tensors are CPU
tensors without numbers. Most operators save and allocate alike on both devices. Two do not: attention (the
CPU repeats key heads) and the root-mean-square norm (the CPU takes it apart into five tensors). Here they
are replaced by what CUDA's operators allocate and keep.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional

_aten = torch.ops.aten


@contextlib.contextmanager
def as_on_cuda() -> Iterator[None]:
    """Inside, functions whose CPU form differs are those of CUDA, also where a backward computes again."""
    with (
        patch.object(functional, "scaled_dot_product_attention", _attention),
        patch.object(functional, "rms_norm", _rms_norm),
        patch.object(torch, "rms_norm", _rms_norm),
    ):
        yield


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002 - torch's own signature
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Hopper's choice: cuDNN, which reads grouped heads and an additive mask; fp32 is computed in blocks."""
    del enable_gqa
    if torch.is_autocast_enabled(query.device.type):
        lower = torch.get_autocast_dtype(query.device.type)
        query, key, value = (x.to(lower) for x in (query, key, value))
    bias = attn_mask
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        bias = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, float("-inf"))
    if query.dtype in (torch.float16, torch.bfloat16):
        return _aten._scaled_dot_product_cudnn_attention(
            query, key, value, bias, True, dropout_p, is_causal, False, scale=scale
        )[0]
    heads = query.shape[1]
    key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
    bias = None if bias is None else bias.expand(query.shape[0], heads, -1, -1)
    return _aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, True, dropout_p, is_causal, scale=scale
    )[0]


class _RmsNorm(torch.autograd.Function):
    """What CUDA's fused norm keeps and makes; torch offers it on the CPU only taken apart."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        rstd = x.new_empty((*x.shape[:-1], 1), dtype=wide)
        ctx.save_for_backward(x, rstd, *([] if weight is None else [weight]))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, _, *weights = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weights[0]) if weights else None


def _rms_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    if torch.compiler.is_compiling():  # the compiler takes CUDA's operator apart itself, by its own rules
        return _aten._fused_rms_norm(input, list(normalized_shape), weight, eps)[0]
    return _RmsNorm.apply(input, weight)  # pyright: ignore[reportReturnType]
