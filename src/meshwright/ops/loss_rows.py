"""What the loss does to rows of logits: plain, for any device and dtype. `loss_triton` is the fast form.

    lse[t]      = log sum_v exp(logits[t, v])
    logits[t,v] <- weight[t] (exp(logits[t, v] - lse[t]) - [v == target[t]])

or, with one pass instead of two and a factor weight[t] / sum[t] left to the caller,

    logits[t,v] <- exp(logits[t, v] - highest[t]) - sum[t] [v == target[t]]

A target outside the columns at hand belongs to another rank: its row has no onehot here.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Statistics(NamedTuple):
    """Of each row the highest logit, the sum of exp(logit - highest), and the target's logit (else 0).

    With `unscaled_gradient` a logit near the highest may stand in its place.
    """

    highest_T: Tensor
    sums_T: Tensor
    chosen_T: Tensor


class RowKernels(NamedTuple):
    """The passes over a chunk of logits; the last is the other two where no other rank is asked.

    Its numbers are as large as the vocabulary: too large for fp16.
    """

    statistics: Callable[[Tensor, Tensor], Statistics]
    to_gradient: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    unscaled_gradient: Callable[[Tensor, Tensor], Statistics]
    accumulate: Callable[[Tensor, Tensor, Tensor, bool], None]


def wide_dtype(x: Tensor) -> torch.dtype:
    """The dtype that sums and tables are kept in: float64 for float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def statistics(logits_TV: Tensor, targets_T: Tensor) -> Statistics:
    """One read of the logits."""
    wide_TV = logits_TV.to(wide_dtype(logits_TV))
    highest_T = wide_TV.amax(-1)
    sums_T = (wide_TV - highest_T[:, None]).exp().sum(-1)
    is_here_T = (targets_T >= 0) & (targets_T < logits_TV.shape[1])
    chosen_T = wide_TV.gather(-1, torch.where(is_here_T, targets_T, 0)[:, None]).squeeze(-1)
    return Statistics(highest_T, sums_T, torch.where(is_here_T, chosen_T, 0.0))


def to_gradient(logits_TV: Tensor, normalisers_T: Tensor, targets_T: Tensor, weights_T: Tensor) -> None:
    """One read and one write: the logits are overwritten by the gradient of the weighted loss."""
    columns_V = torch.arange(logits_TV.shape[1], device=logits_TV.device)
    is_target_TV = (columns_V == targets_T[:, None]).to(normalisers_T.dtype)
    chances_TV = (logits_TV.to(normalisers_T.dtype) - normalisers_T[:, None]).exp_()
    logits_TV.copy_(chances_TV.sub_(is_target_TV).mul_(weights_T[:, None]))


def unscaled_gradient(logits_TV: Tensor, targets_T: Tensor) -> Statistics:
    """The logits are overwritten by the gradient of sum x loss: the caller multiplies by weight / sum."""
    found = statistics(logits_TV, targets_T)
    columns_V = torch.arange(logits_TV.shape[1], device=logits_TV.device)
    at_target_TV = torch.where(columns_V == targets_T[:, None], found.sums_T[:, None], 0.0)
    exponentials_TV = (logits_TV.to(found.sums_T.dtype) - found.highest_T[:, None]).exp_()
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


def _only_statistics(logits_TV: Tensor, *_: Tensor) -> Statistics:
    return Statistics(*logits_TV.new_empty((3, len(logits_TV)), dtype=torch.float32))


def _nothing(*_: Tensor) -> None:
    return None


def _accumulate_in_place(total: Tensor, a: Tensor, b: Tensor, is_first: bool) -> None:  # noqa: FBT001
    if a.dtype == total.dtype:
        accumulate(total, a, b, is_first)
    else:  # a matmul that allocates nothing, as CUDA's with an fp32 output does
        torch.mm(a, b, out=total.view(a.dtype)[:, : b.shape[1]])


# Allocates what the CUDA kernels allocate and computes nothing: for a rehearsal, whose tensors have no data.
SIMULATED = RowKernels(_only_statistics, _nothing, _only_statistics, _accumulate_in_place)
