"""Linears that share their input, as one product: queries, keys and values; gate and up."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from meshwright.models.layers.attention import Attention
from meshwright.models.layers.linear import Linear, Product, Projections
from meshwright.models.layers.mlp import Gated, SwiGlu
from meshwright.ops.fused_linear import joint_linear
from meshwright.ops.loss import compute_dtype
from meshwright.ops.swiglu import swiglu


class JointProjections(Projections):
    """One product, cut into those of the linears."""

    def __init__(self) -> None:
        super().__init__()
        self.totals: Sequence[Tensor] = ()  # as those of a linear

    def forward(self, x: Tensor, linears: Sequence[Linear]) -> list[Tensor]:
        """Contiguous parts: one that is kept for backward would else keep all of them."""
        parts = _joint(x, linears, self.totals).split([len(linear.weight) for linear in linears], dim=-1)
        return [part.contiguous() for part in parts]


class JointGated(Gated):
    """silu(gate) * up of one product."""

    def __init__(self) -> None:
        super().__init__()
        self.totals: Sequence[Tensor] = ()  # as those of a linear

    def forward(self, x: Tensor, gate: Linear, up: Linear) -> Tensor:
        """Over the last dim of x."""
        return swiglu(_joint(x, (gate, up), self.totals))


def _joint(x: Tensor, linears: Sequence[Linear], totals: Sequence[Tensor]) -> Tensor:
    y = joint_linear(x, [linear.weight for linear in linears], compute_dtype(x), totals)
    biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
    return y + torch.cat(biases).to(y.dtype) if biases else y


def sharing(module: nn.Module) -> tuple[Linear, ...]:
    """The linears of a module that multiply the same input."""
    if isinstance(module, Attention):
        return module.query, module.key, module.value
    return (module.gate, module.up) if isinstance(module, SwiGlu) else ()


def join(module: Attention | SwiGlu) -> None:
    """Make the linears that share their input one product, unless something else makes their products."""
    maker = module.project if isinstance(module, Attention) else module.inner
    is_plain = type(maker) in (Projections, Gated)
    if not is_plain or any(type(one.product) is not Product or one.collect for one in sharing(module)):
        return
    if isinstance(module, Attention):
        module.project = JointProjections()
    else:
        module.inner = JointGated()


def joint_maker(module: nn.Module) -> JointProjections | JointGated | None:
    """What makes the joint product of a module, where `join` put it."""
    if isinstance(module, Attention) and isinstance(module.project, JointProjections):
        return module.project
    if isinstance(module, SwiGlu) and isinstance(module.inner, JointGated):
        return module.inner
    return None
