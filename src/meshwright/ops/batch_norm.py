"""Batch norm over the samples of several ranks, on any device.

    mean[C] = sum over ranks, samples and places of x / N         N counts them all
    y = (x - mean) / sqrt(var + eps) * weight + bias

Each rank gives (count, mean, squared deviations) and joins those of all, so ranks with fewer samples weigh
less and nothing is lost to the difference of two large sums. One all-gather of 2C + 1 numbers forward, one
all-reduce of 2C backward. Gradients of weight and bias are this rank's part of the sum.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import _BatchNorm  # what all batch norms are; torch's own conversion asks it
from torch.overrides import TorchFunctionMode

from meshwright.errors import SpecError
from meshwright.ops.cast import cast


class _Normalise(torch.autograd.Function):
    """(y, mean, biased variance, N) of x[B, C, ...] over the group."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean_C, var_C, count = _joint_statistics(wide, group)
        inverse_C = (var_C + eps).rsqrt()
        normal = (wide - _along(mean_C, x)) * _along(inverse_C, x)
        y = normal if weight is None else normal * _along(weight, x)
        y = y if bias is None else y + _along(bias, x)
        ctx.save_for_backward(x, weight, mean_C, inverse_C, count)
        ctx.group, ctx.has_bias = group, bias is not None
        ctx.mark_non_differentiable(mean_C, var_C, count)
        return cast(y, x.dtype), mean_C, var_C, count

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight, mean_C, inverse_C, count = ctx.saved_tensors
        wide, grad = x.to(mean_C.dtype), grad_y.to(mean_C.dtype)
        normal = (wide - _along(mean_C, x)) * _along(inverse_C, x)
        local_2C = torch.stack([_over_samples(grad), _over_samples(grad * normal)])
        total_2C = local_2C.clone()
        dist.all_reduce(total_2C, group=ctx.group)
        mean_2C = total_2C / count
        scale_C = inverse_C if weight is None else inverse_C * weight
        grad_x = (grad - _along(mean_2C[0], x) - normal * _along(mean_2C[1], x)) * _along(scale_C, x)
        grad_weight = None if weight is None else local_2C[1].to(weight.dtype)
        grad_bias = local_2C[0].to(grad_y.dtype if weight is None else weight.dtype) if ctx.has_bias else None
        return grad_x.to(x.dtype), grad_weight, grad_bias, None, None


def _joint_statistics(x: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and biased variance of each channel, and their count, over all ranks of the group."""
    count = x.new_tensor([x.numel() // x.shape[1]])
    mean_C = _over_samples(x) / count.clamp(min=1)
    deviations_C = _over_samples((x - _along(mean_C, x)).square())
    mine = torch.cat([count, mean_C, deviations_C])
    everyone = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(everyone, mine, group=group)
    counts_R1, means_RC, deviations_RC = torch.stack(everyone).split([1, x.shape[1], x.shape[1]], dim=1)
    total = counts_R1.sum()
    mean_C = (counts_R1 * means_RC).sum(0) / total
    squares_C = (deviations_RC + counts_R1 * (means_RC - mean_C).square()).sum(0)
    return mean_C, squares_C / total, total


def _over_samples(x: Tensor) -> Tensor:
    """Sum of every channel."""
    return x.sum([dim for dim in range(x.ndim) if dim != 1])


def _along(value_C: Tensor, x: Tensor) -> Tensor:
    """[C] shaped to go with x[B, C, ...]."""
    return value_C.view(1, -1, *[1] * (x.ndim - 2))


class _OverGroup(TorchFunctionMode):
    """While it is on, torch's batch norm of a batch takes its statistics over the group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._group, self.num_calls = group, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not batch_norm:
            return func(*args, **(kwargs or {}))
        self.num_calls += 1
        return _joint_batch_norm(self._group, *args, **(kwargs or {}))


def _joint_batch_norm(  # noqa: PLR0913  the parameters of torch's function
    group: dist.ProcessGroup,
    x: Tensor,
    running_mean_C: Tensor | None,
    running_var_C: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,  # noqa: FBT001, FBT002
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """`torch.nn.functional.batch_norm` over the group; the running statistics follow as they do there."""
    assert training, "a batch norm that trains was asked to use its running statistics"
    y, mean_C, var_C, count = _Normalise.apply(x, weight, bias, eps, group)
    with torch.no_grad():
        if running_mean_C is not None:
            running_mean_C += momentum * (mean_C - running_mean_C)
        if running_var_C is not None:
            unbiased_C = var_C * (count / (count - 1).clamp(min=1))
            running_var_C += momentum * (unbiased_C - running_var_C)
    return y


def synchronise(norm: _BatchNorm, group: dist.ProcessGroup) -> None:
    """Make a batch norm take its statistics over the group while it trains; names and buffers stay.

    Its own forward runs on: batch norms of some libraries apply an activation as well.
    """
    # Torch's own over ranks refuses the CPU before it comes to the plain function.
    alone = partial(_BatchNorm.forward, norm) if isinstance(norm, nn.SyncBatchNorm) else norm.forward

    def forward(x: Tensor) -> Tensor:
        if not norm.training:
            return alone(x)
        with _OverGroup(group) as over_group:
            y = alone(x)
        if not over_group.num_calls:
            raise SpecError(
                f"the forward of {type(norm).__name__} does not call torch's batch_norm",
                where="sync_batch_norm",
                hint="leave sync_batch_norm out, or use nn.BatchNorm2d",
            )
        return y

    together: Any = torch.compiler.disable(forward)  # the collectives are no part of a compiled graph
    norm.forward = together


def batch_norms(model: nn.Module) -> list[_BatchNorm]:
    """Every batch norm inside a module."""
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]
