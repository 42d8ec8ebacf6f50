"""Low-rank adapters (LoRA) beside a frozen linear or the stacked matrices of routed experts.

    y = x W^T + scale (dropout(x) A^T) B^T                                  lora
    y = (x W^T + scale (x A^T) B^T) m / |W + scale B A|                     dora; the norm is over inputs

The output has the state of the linear's own output: with tp sharded over outputs, or a partial sum that the
linear reduces afterwards. Dropout is on the input of A alone, and every adapter draws its own mask.
"""

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from meshwright.hardware.simulated_device import SimulatedDevice
from meshwright.models.layers.matmul import Matmul
from meshwright.ops.cast import accumulation_dtype
from meshwright.ops.collectives import all_reduce_forward
from meshwright.ops.grouped_mm import grouped_linear
from meshwright.ops.sharded import local


class Adapter(nn.Module):
    """The adapter of one linear; with a magnitude it is DoRA."""

    def __init__(
        self,
        in_width: int,
        out_width: int,
        *,
        rank: int,
        scale: float,
        dropout: float = 0.0,
        has_magnitude: bool = False,
    ) -> None:
        super().__init__()
        self.scale = scale
        self.lora_A = nn.Parameter(torch.empty(rank, in_width))
        self.lora_B = nn.Parameter(torch.empty(out_width, rank))
        self.magnitude = nn.Parameter(torch.empty(out_width)) if has_magnitude else None
        self.dropout = nn.Dropout(dropout) if dropout else None
        # Replaced where the input is gathered again in backward.
        self.matmul: nn.Module = Matmul()
        # Set in compiled blocks: added in the matmul of its frozen linear (`ops/adapted_linear.py`).
        self.is_fused = False
        # Set where tp shards the input dim: the ranks that hold the other columns of W and A.
        self.input_group: ProcessGroup | None = None

    def forward(self, x: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        """The adapted output, where y = x W^T; dora reads W, this rank's part of the frozen weight."""
        y = self.added(x, y)
        if self.magnitude is None:
            return y
        assert weight is not None
        return y * (local(self.magnitude) / self.row_norms(weight)).to(y.dtype)

    @property
    def can_be_fused(self) -> bool:
        """Whether the frozen linear's operator can add this adapter: without dropout and magnitude."""
        return self.dropout is None and self.magnitude is None

    def factors(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(u, b): what is added is u b^T; the scale is applied to B, which is small."""
        x = x if self.dropout is None else self.dropout(x)
        return self.matmul(x, local(self.lora_A)), self.scale * local(self.lora_B)

    def added(self, x: Tensor, y: Tensor) -> Tensor:
        """y + scale (dropout(x) A^T) B^T."""
        u, b = self.factors(x)
        if torch.compiler.is_compiling():  # the compiler adds in the kernel that reads the sum
            return y + torch.mm(u.flatten(0, -2), b.mT).view(y.shape)
        return torch.addmm(y.flatten(0, -2), u.flatten(0, -2), b.mT).view(y.shape)

    @torch.no_grad()
    def row_norms(self, weight: Tensor) -> Tensor:
        """|W + scale B A| of each output, in fp32 (fp64 for fp64). Communicates over `input_group`."""
        dtype = accumulation_dtype(weight)
        change = local(self.lora_B).to(dtype) @ local(self.lora_A).to(dtype)
        squares = (weight.to(dtype) + self.scale * change).square().sum(1)
        if self.input_group is not None:
            squares = all_reduce_forward(squares, self.input_group)
        return squares.sqrt()


class ExpertAdapter(nn.Module):
    """The adapters of one projection of all routed experts, stacked; each expert has its own A and B."""

    def __init__(
        self,
        num_experts: int,
        in_width: int,
        out_width: int,
        *,
        rank: int,
        scale: float,
        has_magnitude: bool = False,
    ) -> None:
        super().__init__()
        self.scale = scale
        self.lora_A = nn.Parameter(torch.empty(num_experts, rank, in_width))
        self.lora_B = nn.Parameter(torch.empty(num_experts, out_width, rank))
        self.magnitude = nn.Parameter(torch.empty(num_experts, out_width)) if has_magnitude else None
        # Set where etp shards the input dim: the ranks that hold the other columns of W and A.
        self.input_group: ProcessGroup | None = None

    def forward(
        self,
        x_ND: Tensor,
        y_NF: Tensor,
        counts_E: Tensor,
        simulated: SimulatedDevice | None = None,
        weight_EFD: Tensor | None = None,
    ) -> Tensor:
        """y_NF of rows sorted by expert, with what each row's adapter adds; dora reads the frozen weights."""
        x_NR = grouped_linear(x_ND, local(self.lora_A), counts_E, simulated)
        y_NF = y_NF + grouped_linear(x_NR, self.scale * local(self.lora_B), counts_E, simulated)
        if self.magnitude is None:
            return y_NF
        assert weight_EFD is not None
        ratio_EF = (local(self.magnitude) / self.row_norms(weight_EFD)).to(y_NF.dtype)
        return y_NF * ratio_EF[_experts_of_rows(counts_E, len(y_NF))]

    @torch.no_grad()
    def row_norms(self, weight_EFD: Tensor) -> Tensor:
        """|W + scale B A| of each output of each expert, in fp32 (fp64 for fp64).

        |W + s B A|^2 = |W|^2 + 2 s (W A^T) B + s^2 (B A A^T) B by rows, so B A, which has the size of all
        experts, never exists; selective recompute would save it. Communicates over `input_group`.
        """
        dtype = accumulation_dtype(weight_EFD)
        weight_EFD = weight_EFD.to(dtype)
        a_ERD, b_EFR = local(self.lora_A).to(dtype), self.scale * local(self.lora_B).to(dtype)
        mixed_EFR = 2 * (weight_EFD @ a_ERD.mT) + b_EFR @ (a_ERD @ a_ERD.mT)
        squares_EF = torch.linalg.vector_norm(weight_EFD, dim=-1).square() + (mixed_EFR * b_EFR).sum(-1)
        if self.input_group is not None:
            squares_EF = all_reduce_forward(squares_EF, self.input_group)
        return squares_EF.sqrt()


def _experts_of_rows(counts_E: Tensor, num_rows: int) -> Tensor:
    """The expert of each row, of rows sorted by expert; rows after the last one have the last expert."""
    rows_N = torch.arange(num_rows, device=counts_E.device)
    ends_E = counts_E.cumsum(0)
    return torch.searchsorted(ends_E, rows_N, right=True).clamp(max=len(counts_E) - 1)
