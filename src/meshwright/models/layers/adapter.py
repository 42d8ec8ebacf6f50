"""Low-rank adapters (LoRA) beside a frozen linear or the stacked matrices of routed experts.

    y = x W^T + scale (drop(x) A^T) B^T                                     lora
    y = (x W^T + scale (x A^T) B^T) r,  r = m / |W + scale B A|             dora; the norm is over inputs
    y = x W^T + (r - 1) drop(x) W^T + r scale (drop(x) A^T) B^T             dora with dropout, as in peft

The output has the state of the linear's own output: with tp sharded over outputs, or a partial sum that the
linear reduces afterwards. Dropout is on the input of the adapter alone, and every adapter has its own mask,
which is the same on any mesh (`ops/dropout.py`).
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from meshwright.hardware.simulated_device import SimulatedDevice
from meshwright.models.layers.matmul import Matmul
from meshwright.ops.cast import accumulation_dtype
from meshwright.ops.collectives import all_reduce_forward
from meshwright.ops.dropout import DropoutMask
from meshwright.ops.dropout_keys import mixed, number_of_name
from meshwright.ops.grouped_mm import grouped_linear
from meshwright.ops.rescaled_sum import rescaled_sum
from meshwright.ops.sharded import local

Frozen = Callable[[Tensor], Tensor]
"""x W^T of the frozen matrix of an adapter."""


class AdapterDropout(nn.Module):
    """Makes the masks of one adapter, in training."""

    def __init__(self, probability: float, name: str) -> None:
        """`name` is that of the matrix in its block: one compiled graph serves all blocks, whose numbers are
        in the keys."""
        super().__init__()
        self.probability, self.number = probability, number_of_name(name)
        # Which shard of the input dim this rank has, where tp shards it.
        self.input_shard = 0

    def forward(self, x: Tensor, keys: Tensor | None) -> DropoutMask | None:
        """The mask of an input; None in evaluation."""
        if not self.training:
            return None
        assert keys is not None, "training with dropout needs the keys of a batch"
        return DropoutMask(mixed(keys, self.number), self.input_shard * x.shape[-1], self.probability)


class Adapter(nn.Module):
    """The adapter of one linear; with a magnitude it is DoRA."""

    def __init__(
        self,
        in_width: int,
        out_width: int,
        *,
        rank: int,
        scale: float,
        dropout: AdapterDropout | None = None,
        has_magnitude: bool = False,
    ) -> None:
        super().__init__()
        self.scale = scale
        self.lora_A = nn.Parameter(torch.empty(rank, in_width))
        self.lora_B = nn.Parameter(torch.empty(out_width, rank))
        self.magnitude = nn.Parameter(torch.empty(out_width)) if has_magnitude else None
        self.dropout = dropout
        # Replaced where the input is gathered again in backward.
        self.matmul: nn.Module = Matmul()
        # Set in compiled blocks: added in the matmul of its frozen linear (`ops/adapted_linear.py`).
        self.is_fused = False
        # Set where tp shards the input dim: the ranks that hold the other columns of W and A.
        self.input_group: ProcessGroup | None = None

    def forward(
        self,
        x: Tensor,
        y: Tensor,
        *,
        dropout_keys: Tensor | None = None,
        weight: Tensor | None = None,
        frozen: Frozen | None = None,
    ) -> Tensor:
        """The adapted output, where y = x W^T; dora reads W, this rank's part of the frozen weight, and with
        dropout multiplies by it once more."""
        mask = None if self.dropout is None else self.dropout(x, dropout_keys)
        u, b = self._factors(x, mask)
        if self.magnitude is None:
            return self._added(y, u, b)
        assert weight is not None and frozen is not None
        norms = row_norms(weight, local(self.lora_A), local(self.lora_B), self.scale, self.input_group)
        ratio = local(self.magnitude) / norms
        if mask is None:
            return self._added(y, u, b) * ratio.to(y.dtype)
        return rescaled_sum(y, frozen(mask.drop(x)), u @ b.mT, ratio)

    def shard_input(self, group: ProcessGroup) -> None:
        """Note that tp shards the input dim over this group."""
        self.input_group = group
        if self.dropout is not None:
            self.dropout.input_shard = group.rank()

    @property
    def can_be_fused(self) -> bool:
        """Whether the frozen linear's operator can add this adapter: without dropout and magnitude."""
        return self.dropout is None and self.magnitude is None

    def scaled_factors(self) -> tuple[Tensor, Tensor]:
        """This rank's A, and B multiplied by the scale."""
        return local(self.lora_A), self.scale * local(self.lora_B)

    def factors(self, x: Tensor, dropout_keys: Tensor | None) -> tuple[Tensor, Tensor]:
        """(u, b): what is added is u b^T; the scale is applied to B, which is small."""
        return self._factors(x, None if self.dropout is None else self.dropout(x, dropout_keys))

    def _factors(self, x: Tensor, mask: DropoutMask | None) -> tuple[Tensor, Tensor]:
        return self.matmul(x, local(self.lora_A), mask=mask), self.scale * local(self.lora_B)

    def _added(self, y: Tensor, u: Tensor, b: Tensor) -> Tensor:
        """y + u b^T."""
        if torch.compiler.is_compiling():  # the compiler adds in the kernel that reads the sum
            return y + torch.mm(u.flatten(0, -2), b.mT).view(y.shape)
        return torch.addmm(y.flatten(0, -2), u.flatten(0, -2), b.mT).view(y.shape)


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
        dropout: AdapterDropout | None = None,
        has_magnitude: bool = False,
    ) -> None:
        super().__init__()
        self.scale, self.dropout = scale, dropout
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
        *,
        dropout_keys_N: Tensor | None = None,
        weight_EFD: Tensor | None = None,
        frozen: Frozen | None = None,
    ) -> Tensor:
        """y_NF of rows sorted by expert, with what each row's adapter adds; dora reads the frozen weights,
        and with dropout multiplies by them once more."""
        mask = None if self.dropout is None else self.dropout(x_ND, dropout_keys_N)
        a_ERD, b_EFR = local(self.lora_A), self.scale * local(self.lora_B)
        if mask is None:
            x_NR = grouped_linear(x_ND, a_ERD, counts_E, simulated)
        else:
            x_NR = mask.grouped_linear(x_ND, a_ERD, counts_E, simulated)
        if self.magnitude is None:
            return y_NF + grouped_linear(x_NR, b_EFR, counts_E, simulated)
        assert weight_EFD is not None and frozen is not None
        ratio_EF, expert_N = self._ratios(weight_EFD), _experts_of_rows(counts_E, len(y_NF))
        if mask is None:
            y_NF = y_NF + grouped_linear(x_NR, b_EFR, counts_E, simulated)
            return y_NF * ratio_EF.to(y_NF.dtype)[expert_N]
        added_NF = grouped_linear(x_NR, b_EFR, counts_E, simulated)
        return rescaled_sum(y_NF, frozen(mask.drop(x_ND)), added_NF, ratio_EF[expert_N])

    def shard_input(self, group: ProcessGroup) -> None:
        """Note that etp shards the input dim over this group."""
        self.input_group = group
        if self.dropout is not None:
            self.dropout.input_shard = group.rank()

    def _ratios(self, weight_EFD: Tensor) -> Tensor:
        """m / |W + scale B A| of each output of each expert."""
        assert self.magnitude is not None
        a_ERD, b_EFR = local(self.lora_A), local(self.lora_B)
        return local(self.magnitude) / row_norms(weight_EFD, a_ERD, b_EFR, self.scale, self.input_group)


@torch.no_grad()
def row_norms(weight: Tensor, a: Tensor, b: Tensor, scale: float, input_group: ProcessGroup | None) -> Tensor:
    """|W + scale B A| of each output, in fp32 (fp64 for fp64). Communicates over `input_group`.

    |W + s B A|^2 = |W|^2 + 2 s (W A^T) B + s^2 (B A A^T) B by rows, so B A, which has the size of W, never
    exists; selective recompute would save it.
    """
    dtype = accumulation_dtype(weight)
    weight, a, b = weight.to(dtype), a.to(dtype), scale * b.to(dtype)
    mixed = 2 * (weight @ a.mT) + b @ (a @ a.mT)
    squares = torch.linalg.vector_norm(weight, dim=-1).square() + (mixed * b).sum(-1)
    if input_group is not None:
        squares = all_reduce_forward(squares, input_group)
    return squares.sqrt()


def _experts_of_rows(counts_E: Tensor, num_rows: int) -> Tensor:
    """The expert of each row, of rows sorted by expert; rows after the last one have the last expert."""
    rows_N = torch.arange(num_rows, device=counts_E.device)
    ends_E = counts_E.cumsum(0)
    return torch.searchsorted(ends_E, rows_N, right=True).clamp(max=len(counts_E) - 1)
