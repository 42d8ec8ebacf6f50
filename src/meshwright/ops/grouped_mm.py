"""Grouped matmul: one matmul per group of rows, for routed experts."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import register_flop_formula

from meshwright.hardware.simulated_device import SimulatedDevice, kernel_device

_ALIGNED_BYTES = 16  # the grouped kernel reads rows in vectors of this size


def grouped_linear(
    x_ND: Tensor, weight_EFD: Tensor, counts_E: Tensor, simulated: SimulatedDevice | None = None
) -> Tensor:
    """y_NF: row n times the weight of its group; the rows of a group are contiguous, and groups are in order.

    Groups may be empty; their weight then gets a zero gradient. One kernel where the device has it (bf16 on
    CUDA, no host sync); elsewhere one matmul per group, for which the host reads the counts. In compiled code
    that is one operator: numbers that the compiler reads from a tensor split its graphs.
    """
    if torch.is_autocast_enabled(x_ND.device.type):
        dtype = torch.get_autocast_dtype(x_ND.device.type)
        x_ND, weight_EFD = x_ND.to(dtype), weight_EFD.to(dtype)
    if _has_kernel(x_ND, weight_EFD.shape[-2:], simulated):
        return functional.grouped_mm(x_ND, weight_EFD.transpose(-2, -1), offs=group_ends(counts_E))
    if torch.compiler.is_compiling():
        return _each_group(x_ND, weight_EFD, counts_E)
    rows = x_ND.split(counts_E.tolist())  # host sync: split needs the sizes
    parts = [functional.linear(part, weight) for part, weight in zip(rows, weight_EFD.unbind(), strict=True)]
    return torch.cat(parts)


def grouped_weight_gradient(
    dy_NF: Tensor, x_ND: Tensor, counts_E: Tensor, simulated: SimulatedDevice | None = None
) -> Tensor:
    """dW_EFD: dy^T x over the rows of each group; zero for an empty one."""
    if _has_kernel(x_ND, (dy_NF.shape[1], x_ND.shape[1]), simulated):
        return _summed_over_rows(dy_NF, x_ND, group_ends(counts_E))
    if torch.compiler.is_compiling():
        return _weight_gradient_of_each_group(dy_NF, x_ND, counts_E)
    return _stacked_gradients(dy_NF, x_ND, counts_E)


def _stacked_gradients(dy_NF: Tensor, x_ND: Tensor, counts_E: Tensor) -> Tensor:
    counts = counts_E.tolist()  # host sync: split needs the sizes
    parts = zip(dy_NF.split(counts), x_ND.split(counts), strict=True)
    return torch.stack([dy.t() @ x for dy, x in parts])


@torch.library.custom_op("meshwright::each_group", mutates_args=())
def _each_group(x_ND: Tensor, weight_EFD: Tensor, counts_E: Tensor) -> Tensor:
    y_NF = x_ND.new_empty((len(x_ND), weight_EFD.shape[1]))
    counts = counts_E.tolist()  # host sync: split needs the sizes
    for x, y, weight in zip(x_ND.split(counts), y_NF.split(counts), weight_EFD.unbind(), strict=True):
        torch.mm(x, weight.t(), out=y)
    return y_NF


@_each_group.register_fake
def _(x_ND: Tensor, weight_EFD: Tensor, counts_E: Tensor) -> Tensor:
    return x_ND.new_empty((x_ND.shape[0], weight_EFD.shape[1]))


def _save_for_each_group(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    del output
    ctx.save_for_backward(*inputs)


def _backward_of_each_group(ctx: Any, dy_NF: Tensor) -> tuple[Tensor | None, ...]:
    x_ND, weight_EFD, counts_E = ctx.saved_tensors
    has_dx, has_dweight, _ = ctx.needs_input_grad
    dx_ND = _each_group(dy_NF, weight_EFD.mT, counts_E) if has_dx else None
    dweight_EFD = _weight_gradient_of_each_group(dy_NF, x_ND, counts_E) if has_dweight else None
    return dx_ND, dweight_EFD, None


_each_group.register_autograd(_backward_of_each_group, setup_context=_save_for_each_group)


@torch.library.custom_op("meshwright::weight_gradient_of_each_group", mutates_args=())
def _weight_gradient_of_each_group(dy_NF: Tensor, x_ND: Tensor, counts_E: Tensor) -> Tensor:
    return _stacked_gradients(dy_NF, x_ND, counts_E)


@_weight_gradient_of_each_group.register_fake
def _(dy_NF: Tensor, x_ND: Tensor, counts_E: Tensor) -> Tensor:
    return x_ND.new_empty((len(counts_E), dy_NF.shape[1], x_ND.shape[1]))


@register_flop_formula(torch.ops.meshwright.each_group)
def _(x_ND: torch.Size, weight_EFD: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * x_ND[0] * x_ND[1] * weight_EFD[1]


@register_flop_formula(torch.ops.meshwright.weight_gradient_of_each_group)
def _(dy_NF: torch.Size, x_ND: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * dy_NF[0] * dy_NF[1] * x_ND[1]


# The matmul of forward, whose output selective recompute saves.
EACH_GROUP_OPERATORS = (torch.ops.meshwright.each_group.default,)


@torch.library.custom_op("meshwright::grouped_weight_gradient", mutates_args=())
def _summed_over_rows(dy_NF: Tensor, x_ND: Tensor, ends_E: Tensor) -> Tensor:
    """A custom op, so that the compiler keeps the layout of dy: groups of a row-major dy^T would have to
    begin at multiples of 16 bytes."""
    return functional.grouped_mm(dy_NF.contiguous().t(), x_ND.contiguous(), offs=ends_E)


@_summed_over_rows.register_fake
def _(dy_NF: Tensor, x_ND: Tensor, ends_E: Tensor) -> Tensor:
    return x_ND.new_empty((len(ends_E), dy_NF.shape[1], x_ND.shape[1]))


def group_ends(counts_E: Tensor) -> Tensor:
    """The row after the last one of each group."""
    return counts_E.cumsum(0, dtype=torch.int32)


def count_groups(ids_N: Tensor, num_groups: int) -> Tensor:
    """Number of occurrences of each id in [0, num_groups); other ids are not counted. No host sync."""
    counts = torch.zeros(num_groups + 1, dtype=torch.int64, device=ids_N.device)
    ids_N = ids_N.flatten().clamp(max=num_groups)
    return counts.scatter_add_(0, ids_N, torch.ones_like(ids_N))[:num_groups]


def _has_kernel(x_ND: Tensor, widths: Sequence[int], simulated: SimulatedDevice | None) -> bool:
    is_cuda = kernel_device(x_ND.device.type, simulated) == "cuda"
    if not is_cuda or x_ND.dtype != torch.bfloat16 or not len(x_ND):
        return False
    return all(width * x_ND.element_size() % _ALIGNED_BYTES == 0 for width in widths)
