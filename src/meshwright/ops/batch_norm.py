"""Synchronised batch norm: statistics over the samples of several ranks, on any device.

    mean[C] = sum over ranks, samples and positions of x / N         N counts them all
    y = (x - mean) / sqrt(var + eps) * weight + bias

Each rank contributes (count, mean, squared deviations), and all are combined, so ranks with fewer samples
weigh less and there is no cancellation between two large sums. One all-gather of 2C + 1 values in forward,
one all-reduce of 2C in backward. The gradients of weight and bias are this rank's terms of the sum over
ranks.

`_BatchNorm` is private in torch: it is the common base of all batch norms, and torch's own conversion tests
for it.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from meshwright.errors import SpecError
from meshwright.ops.cast import cast


class _Normalise(torch.autograd.Function):
    """(y, mean, biased variance, N) of x[B, C, ...] over the group."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x32 = x.to(torch.promote_types(x.dtype, torch.float32))
        mean_C, var_C, count = _group_statistics(x32, group)
        inverse_C = (var_C + eps).rsqrt()
        normal = (x32 - _per_channel(mean_C, x)) * _per_channel(inverse_C, x)
        y = normal if weight is None else normal * _per_channel(weight, x)
        y = y if bias is None else y + _per_channel(bias, x)
        ctx.save_for_backward(x, weight, mean_C, inverse_C, count)
        ctx.group, ctx.has_bias = group, bias is not None
        ctx.mark_non_differentiable(mean_C, var_C, count)
        return cast(y, x.dtype), mean_C, var_C, count

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight, mean_C, inverse_C, count = ctx.saved_tensors
        x32, grad = x.to(mean_C.dtype), grad_y.to(mean_C.dtype)
        normal = (x32 - _per_channel(mean_C, x)) * _per_channel(inverse_C, x)
        local_2C = torch.stack([_channel_sums(grad), _channel_sums(grad * normal)])
        total_2C = local_2C.clone()
        dist.all_reduce(total_2C, group=ctx.group)
        mean_2C = total_2C / count
        scale_C = inverse_C if weight is None else inverse_C * weight
        grad_x = (grad - _per_channel(mean_2C[0], x) - normal * _per_channel(mean_2C[1], x)) * _per_channel(
            scale_C, x
        )
        grad_weight = None if weight is None else local_2C[1].to(weight.dtype)
        grad_bias = local_2C[0].to(grad_y.dtype if weight is None else weight.dtype) if ctx.has_bias else None
        return grad_x.to(x.dtype), grad_weight, grad_bias, None, None


def _group_statistics(x: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and biased variance of each channel, and their count, over all ranks of the group."""
    count = x.new_tensor([x.numel() // x.shape[1]])
    mean_C = _channel_sums(x) / count.clamp(min=1)
    deviations_C = _channel_sums((x - _per_channel(mean_C, x)).square())
    local = torch.cat([count, mean_C, deviations_C])
    gathered = [torch.empty_like(local) for _ in range(group.size())]
    dist.all_gather(gathered, local, group=group)
    counts_R1, means_RC, deviations_RC = torch.stack(gathered).split([1, x.shape[1], x.shape[1]], dim=1)
    total = counts_R1.sum()
    mean_C = (counts_R1 * means_RC).sum(0) / total
    squares_C = (deviations_RC + counts_R1 * (means_RC - mean_C).square()).sum(0)
    return mean_C, squares_C / total, total


def _channel_sums(x: Tensor) -> Tensor:
    """The sum of each channel."""
    return x.sum([dim for dim in range(x.ndim) if dim != 1])


def _per_channel(value_C: Tensor, x: Tensor) -> Tensor:
    """[C] reshaped to broadcast with x[B, C, ...]."""
    return value_C.view(1, -1, *[1] * (x.ndim - 2))


class _OverGroup(TorchFunctionMode):
    """Inside, torch's functional batch norm takes its statistics over the group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._group, self.num_calls = group, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not batch_norm:
            return func(*args, **(kwargs or {}))
        self.num_calls += 1
        return _group_batch_norm(self._group, *args, **(kwargs or {}))


def _group_batch_norm(  # noqa: PLR0913  the parameters of torch's function
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
    """`torch.nn.functional.batch_norm` over the group, including the update of the running statistics."""
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
    """Make a batch norm take its statistics over the group in training; names and buffers stay.

    Its own forward still runs: batch norms of some libraries apply an activation as well.
    """
    # SyncBatchNorm refuses CPU tensors before it calls the functional form.
    unsynchronised = partial(_BatchNorm.forward, norm) if isinstance(norm, nn.SyncBatchNorm) else norm.forward

    def forward(x: Tensor) -> Tensor:
        if not norm.training:
            return unsynchronised(x)
        with _OverGroup(group) as over_group:
            y = unsynchronised(x)
        if not over_group.num_calls:
            raise SpecError(
                f"the forward of {type(norm).__name__} does not call torch's batch_norm",
                where="sync_batch_norm",
                hint="leave sync_batch_norm out, or use nn.BatchNorm2d",
            )
        return y

    synchronised: Any = torch.compiler.disable(forward)  # keep the collectives out of compiled graphs
    norm.forward = synchronised


def batch_norms(model: nn.Module) -> list[_BatchNorm]:
    """Every batch norm inside a module."""
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]
