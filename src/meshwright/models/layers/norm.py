"""Normalisations over the last dim, computed in float32 (float64 for float64) and cast back."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.ops.cast import accumulation_dtype
from meshwright.ops.sharded import local
from meshwright.spec import ModelSpec


class RMSNorm(nn.Module):
    """x / rms(x) * weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """The normalised x, in its shape and dtype."""
        dtype = accumulation_dtype(x)
        weight = local(self.weight).to(dtype)
        return functional.rms_norm(x.to(dtype), weight.shape, weight, self.eps).to(x.dtype)


class LayerNorm(nn.Module):
    """(x - mean) / std * weight + bias."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """The normalised x, in its shape and dtype."""
        dtype = accumulation_dtype(x)
        weight, bias = local(self.weight).to(dtype), local(self.bias).to(dtype)
        return functional.layer_norm(x.to(dtype), weight.shape, weight, bias, self.eps).to(x.dtype)


def build_norm(spec: ModelSpec) -> RMSNorm | LayerNorm:
    """The norm of the residual stream."""
    kind = RMSNorm if spec.norm == "rms" else LayerNorm
    return kind(spec.width, spec.norm_eps)
