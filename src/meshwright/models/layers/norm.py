"""Normalisations over the last dim, computed in float32 (float64 for float64) and cast back."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.ops.loss_rows import wide_dtype
from meshwright.ops.sharded import local
from meshwright.spec import ModelSpec


class RMSNorm(nn.Module):
    """x / rms(x) * weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Same shape and dtype as x."""
        wide = wide_dtype(x)
        weight = local(self.weight).to(wide)
        return functional.rms_norm(x.to(wide), weight.shape, weight, self.eps).to(x.dtype)


class LayerNorm(nn.Module):
    """(x - mean) / std * weight + bias."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Same shape and dtype as x."""
        wide = wide_dtype(x)
        weight, bias = local(self.weight).to(wide), local(self.bias).to(wide)
        return functional.layer_norm(x.to(wide), weight.shape, weight, bias, self.eps).to(x.dtype)


def build_norm(spec: ModelSpec) -> RMSNorm | LayerNorm:
    """The norm of the residual stream."""
    kind = RMSNorm if spec.norm == "rms" else LayerNorm
    return kind(spec.width, spec.norm_eps)
