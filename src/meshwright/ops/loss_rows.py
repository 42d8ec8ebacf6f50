"""The plain passes of the loss over rows of logits, for any device and dtype; `loss_triton` has fast ones.

    lse[t]      = log sum_v exp(logits[t, v])
    logits[t,v] <- weight[t] (exp(logits[t, v] - lse[t]) - [v == target[t]])

or, with one pass instead of two and a factor weight[t] / sum[t] left to the caller,

    logits[t,v] <- exp(logits[t, v] - max[t]) - sum[t] [v == target[t]]

A target outside the local columns belongs to another rank: its row has no onehot here.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.ops.cast import accumulation_dtype


class Statistics(NamedTuple):
    """The max of each row of logits, the sum of exp(logit - max), and the target's logit (0 if not local).

    From `unscaled_gradient` the max may be another logit close to it.
    """

    max_T: Tensor
    sum_exp_T: Tensor
    target_logit_T: Tensor


class RowKernels(NamedTuple):
    """The passes over a chunk of logits, and the accumulation of dW.

    `unscaled_gradient` does the work of the other two where the vocabulary is not sharded. Its values are as
    large as the vocabulary: too large for fp16.
    """

    statistics: Callable[[Tensor, Tensor], Statistics]
    to_gradient: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    unscaled_gradient: Callable[[Tensor, Tensor], Statistics]
    accumulate: Callable[[Tensor, Tensor, Tensor, bool], None]


def statistics(logits_TV: Tensor, targets_T: Tensor) -> Statistics:
    """The statistics of each row; one read of the logits."""
    fp32_TV = logits_TV.to(accumulation_dtype(logits_TV))
    max_T = fp32_TV.amax(-1)
    sum_exp_T = (fp32_TV - max_T[:, None]).exp().sum(-1)
    is_here_T = (targets_T >= 0) & (targets_T < logits_TV.shape[1])
    target_logit_T = fp32_TV.gather(-1, torch.where(is_here_T, targets_T, 0)[:, None]).squeeze(-1)
    return Statistics(max_T, sum_exp_T, torch.where(is_here_T, target_logit_T, 0.0))


def to_gradient(logits_TV: Tensor, lse_T: Tensor, targets_T: Tensor, weights_T: Tensor) -> None:
    """Overwrite the logits with the gradient of the weighted loss; one read and one write."""
    columns_V = torch.arange(logits_TV.shape[1], device=logits_TV.device)
    is_target_TV = (columns_V == targets_T[:, None]).to(lse_T.dtype)
    probabilities_TV = (logits_TV.to(lse_T.dtype) - lse_T[:, None]).exp_()
    logits_TV.copy_(probabilities_TV.sub_(is_target_TV).mul_(weights_T[:, None]))


def unscaled_gradient(logits_TV: Tensor, targets_T: Tensor) -> Statistics:
    """Overwrite the logits with the gradient of sum x loss: the caller multiplies by weight / sum."""
    found = statistics(logits_TV, targets_T)
    columns_V = torch.arange(logits_TV.shape[1], device=logits_TV.device)
    at_target_TV = torch.where(columns_V == targets_T[:, None], found.sum_exp_T[:, None], 0.0)
    exponentials_TV = (logits_TV.to(found.sum_exp_T.dtype) - found.max_T[:, None]).exp_()
    logits_TV.copy_(exponentials_TV.sub_(at_target_TV))
    return found


def accumulate(total: Tensor, a: Tensor, b: Tensor, is_first: bool) -> None:  # noqa: FBT001
    """total += a b, summed in the dtype of `total`; the first matmul overwrites what is there."""
    if a.is_cuda and a.dtype != total.dtype:
        torch.addmm(total, a, b, beta=0 if is_first else 1, out_dtype=total.dtype, out=total)
        return
    added = (a @ b).to(total.dtype)
    total.copy_(added) if is_first else total.add_(added)


PLAIN = RowKernels(statistics, to_gradient, unscaled_gradient, accumulate)


def _empty_statistics(logits_TV: Tensor, *_: Tensor) -> Statistics:
    return Statistics(*logits_TV.new_empty((3, len(logits_TV)), dtype=torch.float32))


def _no_op(*_: Tensor) -> None:
    return None


def _accumulate_in_place(total: Tensor, a: Tensor, b: Tensor, is_first: bool) -> None:  # noqa: FBT001
    if a.dtype == total.dtype:
        accumulate(total, a, b, is_first)
    else:  # a matmul that allocates nothing, as CUDA's with an fp32 output does
        torch.mm(a, b, out=total.view(a.dtype)[:, : b.shape[1]])


# Allocates what the CUDA kernels allocate and computes nothing: for a rehearsal, whose tensors have no data.
SIMULATED = RowKernels(_empty_statistics, _no_op, _empty_statistics, _accumulate_in_place)
