"""The dense feed-forward layer (MLP)."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.models.layers.linear import Linear
from meshwright.ops.gelu import biased_gelu, gelu
from meshwright.ops.sharded import local
from meshwright.spec import MlpSpec


class GateUp(nn.Module):
    """silu(gate(x)) * up(x); replaced where gate and up are fused into one matmul."""

    def forward(self, x: Tensor, gate: Linear, up: Linear, dropout_keys: Tensor | None = None) -> Tensor:
        """silu(gate(x)) * up(x), over the last dim of x."""
        return functional.silu(gate(x, dropout_keys)) * up(x, dropout_keys)


class SwiGlu(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, width: int, inner_width: int, *, bias: bool = False) -> None:
        super().__init__()
        self.gate = Linear(width, inner_width, bias=bias)
        self.up = Linear(width, inner_width, bias=bias)
        self.down = Linear(inner_width, width, bias=bias)
        self.gate_up: nn.Module = GateUp()

    def forward(self, x_BSD: Tensor, *, dropout_keys_BS: Tensor | None = None) -> Tensor:
        """The output of the MLP, before the residual add."""
        return self.down(self.gate_up(x_BSD, self.gate, self.up, dropout_keys_BS), dropout_keys_BS)


class Gelu(nn.Module):
    """down(gelu(up(x)))."""

    def __init__(self, width: int, inner_width: int, *, bias: bool, approximate: str) -> None:
        super().__init__()
        self.up = Linear(width, inner_width, bias=bias)
        self.down = Linear(inner_width, width, bias=bias)
        self.approximate = approximate

    def forward(self, x_BSD: Tensor, *, dropout_keys_BS: Tensor | None = None) -> Tensor:
        """The output of the MLP, before the residual add."""
        is_fused = self.approximate == "tanh" and torch.compiler.is_compiling()
        if self.up.bias is None or not self.up.is_plain or not is_fused:
            h_BSF = gelu(self.up(x_BSD, dropout_keys_BS), approximate=self.approximate)
            return self.down(h_BSF, dropout_keys_BS)
        bias = local(self.up.bias)
        y_BSF = self.up.matmul(x_BSD, local(self.up.weight), bias.detach())
        return self.down(biased_gelu(y_BSF, bias), dropout_keys_BS)


def build_mlp(mlp: MlpSpec, width: int) -> SwiGlu | Gelu:
    """The dense MLP of this kind."""
    if mlp.kind == "swiglu":
        return SwiGlu(width, mlp.width, bias=mlp.bias)
    approximate = "tanh" if mlp.kind == "gelu_tanh" else "none"
    return Gelu(width, mlp.width, bias=mlp.bias, approximate=approximate)
