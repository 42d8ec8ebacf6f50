"""The matmul of a linear, as a module that can be replaced."""

from torch import Tensor, nn
from torch.nn import functional

from meshwright.ops.dropout import DropoutMask


class Matmul(nn.Module):
    """x W^T + b; replaced where the matmul runs in fp8 or gathers its input again in backward."""

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, mask: DropoutMask | None = None
    ) -> Tensor:
        """x W^T + b, over the last dim of x; with a mask drop(x) W^T, of which adapters have one."""
        return functional.linear(x, weight, bias) if mask is None else mask.linear(x, weight)
