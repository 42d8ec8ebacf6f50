"""Makes torch's functions allocate and save on the CPU what they allocate and save on CUDA.

A fake CUDA tensor in a CPU build of torch aborts the process in autograd, so a trace's tensors are fake CPU
tensors. Most operators allocate and save for backward the same tensors on both devices. Two do not: attention
(the CPU repeats key heads) and RMSNorm (the CPU decomposes it into five tensors). torch offers no switch, so
both functions are patched here with what CUDA's operators allocate and save.
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
def cuda_choices() -> Iterator[None]:
    """Inside, attention and RMSNorm behave as on CUDA, also where a backward recomputes them."""
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
    """Hopper's choice: cuDNN, which takes grouped heads and an additive mask; fp32 runs memory-efficient."""
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
    """What CUDA's fused RMSNorm allocates and saves for backward; on the CPU torch decomposes it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        at_least_fp32 = torch.promote_types(x.dtype, torch.float32)
        rstd = x.new_empty((*x.shape[:-1], 1), dtype=at_least_fp32)
        ctx.save_for_backward(x, rstd, *([] if weight is None else [weight]))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, _, *weights = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weights[0]) if weights else None


def _rms_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    if torch.compiler.is_compiling():  # the compiler decomposes CUDA's operator itself
        return _aten._fused_rms_norm(input, list(normalized_shape), weight, eps)[0]
    return _RmsNorm.apply(input, weight)  # pyright: ignore[reportReturnType]
