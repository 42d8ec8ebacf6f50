"""Linears of one input as one product in fp8: queries, keys and values; gate and up."""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional

from meshwright.models.layers.linear import Linear
from meshwright.ops.sharded import local
from meshwright.precision.fp8.linear import Fp8Product


class NarrowProjections(nn.Module):
    """In the place of Projections."""

    def __init__(self, product: Fp8Product) -> None:
        super().__init__()
        self.product = product

    def forward(self, x: Tensor, linears: Sequence[Linear]) -> list[Tensor]:
        """Contiguous parts: one that is kept for backward would else keep all of them."""
        return [y.contiguous() for y in _together(self.product, x, linears)]


class NarrowGated(nn.Module):
    """In the place of Gated."""

    def __init__(self, product: Fp8Product) -> None:
        super().__init__()
        self.product = product

    def forward(self, x: Tensor, gate: Linear, up: Linear) -> Tensor:
        """silu(gate(x)) * up(x)."""
        gate_BSF, up_BSF = _together(self.product, x, (gate, up))
        return functional.silu(gate_BSF) * up_BSF


def _together(product: Fp8Product, x: Tensor, linears: Sequence[Linear]) -> list[Tensor]:
    products = product.together(x, [local(linear.weight) for linear in linears])
    return [
        y if linear.bias is None else y + local(linear.bias).to(y.dtype)
        for y, linear in zip(products, linears, strict=True)
    ]
