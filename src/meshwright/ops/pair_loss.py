"""The loss of pairs of answers (DPO, IPO, SimPO, ORPO) on the head's input, without storing logits.

    S[a]    = sum over the tokens t of answer a of weight[t] log p(target[t])       in fp32 (fp64 for fp64)
    loss    = sum over pairs of weight[pair] f(S[chosen], S[rejected])
    dloss   = sum over tokens of (df / dS[a(t)]) weight[t] dlog p(target[t])

So the gradient is that of a weighted cross-entropy whose weights are -df/dS, and f itself is small. The sums
are computed first, without a gradient; then `linear_cross_entropy` runs with these weights. The logits are
computed twice, and all that the cross-entropy can do (a sharded vocabulary, rows left out, a frozen head)
holds here too. With cp, each rank has a part of every answer, and the sums are all-reduced.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import logsigmoid

from meshwright.ops.cast import accumulation_dtype
from meshwright.ops.loss import UpdatedHead, linear_cross_entropy, linear_log_probs
from meshwright.ops.loss_rows import RowKernels
from meshwright.spec.preference import PreferenceSpec

WEIGHT, CHOSEN, REJECTED = range(3)
"""Columns of a pair: its weight in the loss, and the reference log-probs of its two answers."""
_LARGEST_LOG_PROB = -1e-7


class PairInputs(NamedTuple):
    """Which tokens belong to which answer."""

    weights_BS: Tensor
    """Weight of each target in the sum of its answer, 0 outside answers."""
    answers_BS: Tensor
    """Answer of each target in its row: 2 p is the chosen, 2 p + 1 the rejected one of pair p."""
    pairs_BPF: Tensor
    """Columns WEIGHT, CHOSEN and REJECTED of each pair of each row; weight 0 for padding."""


class PairResult(NamedTuple):
    """The loss, and what is logged."""

    loss: Tensor
    """This rank's part; the sum over dp and cp is the loss."""
    sums_BA: Tensor
    """Sum of log-probs of each answer, over all cp ranks."""
    figures_3: Tensor
    """Sums over pairs of weight x reward margin, weight x (margin > 0), and weight."""


class PairSettings(NamedTuple):
    """How a head computes the loss of pairs."""

    preference: PreferenceSpec
    cp_group: ProcessGroup | None = None
    """Set where cp shards the sequences."""


def linear_pair_loss(
    x_BSD: Tensor,
    weight_VD: Tensor | UpdatedHead,
    targets_BS: Tensor,
    inputs: PairInputs,
    settings: PairSettings,
    *,
    group: ProcessGroup | None = None,
    kernels: RowKernels | None = None,
    num_counted: int | None = None,
) -> PairResult:
    """The weighted sum of the losses of all pairs. `group` shards the vocabulary, as in the cross-entropy."""
    options = {"group": group, "kernels": kernels, "num_counted": num_counted}
    dtype = accumulation_dtype(x_BSD)
    weights_BS = inputs.weights_BS.to(dtype)
    log_probs_BS = linear_log_probs(x_BSD, weight_VD, targets_BS, weights_BS, **options)
    sums_2BA = _sums(torch.stack((log_probs_BS * weights_BS, weights_BS)), inputs, settings.cp_group)
    sums_BA = sums_2BA[0].detach().clone().requires_grad_()
    with torch.enable_grad():
        losses_BP, margins_BP = pair_losses(sums_BA, sums_2BA[1], inputs.pairs_BPF, settings.preference)
        pair_weights_BP = inputs.pairs_BPF[..., WEIGHT].to(dtype)
        value = (losses_BP * pair_weights_BP).sum()
        (slopes_BA,) = torch.autograd.grad(value, sums_BA)
    token_weights_BS = -slopes_BA.gather(1, inputs.answers_BS) * weights_BS
    surrogate = linear_cross_entropy(x_BSD, weight_VD, targets_BS, token_weights_BS, **options)
    num_parts = 1 if settings.cp_group is None else settings.cp_group.size()
    loss = surrogate + (value.detach() / num_parts - surrogate.detach())
    return PairResult(loss, sums_BA.detach(), _figures(margins_BP.detach(), pair_weights_BP))


def _sums(values_NBS: Tensor, inputs: PairInputs, cp_group: ProcessGroup | None) -> Tensor:
    """Sums over the tokens of each answer, of all cp ranks."""
    num_answers = 2 * inputs.pairs_BPF.shape[1]
    sums = values_NBS.new_zeros((*values_NBS.shape[:2], num_answers))
    sums.scatter_add_(2, inputs.answers_BS.expand_as(values_NBS), values_NBS)
    if cp_group is not None:
        dist.all_reduce(sums, group=cp_group)
    return sums


def pair_losses(
    sums_BA: Tensor, lengths_BA: Tensor, pairs_BPF: Tensor, preference: PreferenceSpec
) -> tuple[Tensor, Tensor]:
    """(loss, reward margin) of each pair."""
    sums_BP2 = sums_BA.unflatten(1, (-1, 2))
    lengths_BP2 = lengths_BA.unflatten(1, (-1, 2)).clamp(min=1.0)
    reference_BP2 = pairs_BPF[..., CHOSEN:].to(sums_BA.dtype)
    means_BP2 = sums_BP2 / lengths_BP2
    beta, kind = preference.beta, preference.loss
    if kind == "sigmoid":
        margins = _difference(beta * (sums_BP2 - reference_BP2))
        smoothing = preference.label_smoothing
        losses = -(1 - smoothing) * logsigmoid(margins) - smoothing * logsigmoid(-margins)
    elif kind == "ipo":
        margins = _difference((sums_BP2 - reference_BP2) / lengths_BP2)
        losses = (margins - 1 / (2 * beta)) ** 2
    elif kind == "simpo":
        margins = _difference(beta * means_BP2)
        losses = -logsigmoid(margins - preference.margin)
    else:
        margins = _difference(beta * means_BP2)
        losses = -means_BP2[..., 0] - beta * logsigmoid(_difference(_log_odds(means_BP2)))
    return losses - preference.nll_weight * means_BP2[..., 0], margins


def _log_odds(log_probs: Tensor) -> Tensor:
    """log(p / (1 - p)); a probability of 1 has finite odds."""
    bounded = log_probs.clamp(max=_LARGEST_LOG_PROB)
    return bounded - torch.log(-torch.expm1(bounded))


def _difference(of_pairs: Tensor) -> Tensor:
    return of_pairs[..., 0] - of_pairs[..., 1]


def _figures(margins_BP: Tensor, weights_BP: Tensor) -> Tensor:
    is_right_BP = (margins_BP > 0).to(weights_BP.dtype)
    columns = (margins_BP * weights_BP, is_right_BP * weights_BP, weights_BP)
    return torch.stack([column.sum() for column in columns]).double()
