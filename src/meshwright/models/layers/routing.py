"""The router, expert capacity and the load-balancing loss of MoE layers."""

from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.ops.cast import accumulation_dtype
from meshwright.ops.grouped_mm import count_groups
from meshwright.ops.sharded import local
from meshwright.spec import MoeSpec

_TINY = 1e-20  # keeps a sum of sigmoid scores that all underflow from dividing by zero


class Routing(NamedTuple):
    """The chosen experts (C per token), their weights, and the scores of all experts."""

    experts_BSC: Tensor
    weights_BSC: Tensor
    scores_BSE: Tensor


class Router(nn.Module):
    """Scores in float32 (float64 for float64), top-k by score plus bias, weights by score alone."""

    balance_bias: Tensor | None

    def __init__(self, moe: MoeSpec, width: int) -> None:
        super().__init__()
        self.moe = moe
        self.weight = nn.Parameter(torch.empty(moe.num_experts, width))
        bias = torch.zeros(moe.num_experts) if moe.has_balance_bias else None
        self.register_buffer("balance_bias", bias)

    def forward(self, x_BSD: Tensor) -> Routing:
        """The top-k experts of every token; none is dropped here."""
        scores_BSE = self._scores(x_BSD)
        bias = self.balance_bias
        for_choice_BSE = scores_BSE.detach()
        if bias is not None:
            for_choice_BSE = for_choice_BSE + bias.to(scores_BSE.dtype)
        if self.moe.num_groups > 1:
            for_choice_BSE = _limit_to_best_groups(for_choice_BSE, self.moe)
        experts_BSC = for_choice_BSE.topk(self.moe.top_k, dim=-1).indices
        weights_BSC = scores_BSE.gather(-1, experts_BSC)
        if self.moe.normalise_top_k:
            weights_BSC = weights_BSC / (weights_BSC.sum(-1, keepdim=True) + _TINY)
        return Routing(experts_BSC, weights_BSC * self.moe.routed_scale, scores_BSE)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:  # noqa: FBT001, FBT002
        """Keep the bias in fp32 when the model is cast to 16 bits: its small updates would round to nothing.

        `_apply` is private in torch: it is the one hook that every cast and move of a module goes through.
        """
        fp32_bias = self.balance_bias
        super()._apply(fn, recurse)
        if fp32_bias is not None and self.balance_bias is not None and self.balance_bias.itemsize < 4:
            self.balance_bias = fp32_bias.to(self.balance_bias.device)
        return self

    def _scores(self, x_BSD: Tensor) -> Tensor:
        dtype = accumulation_dtype(x_BSD)
        with torch.autocast(x_BSD.device.type, enabled=False):
            logits_BSE = functional.linear(x_BSD.to(dtype), local(self.weight).to(dtype))
        return logits_BSE.softmax(-1) if self.moe.score == "softmax" else logits_BSE.sigmoid()


def _limit_to_best_groups(scores_BSE: Tensor, moe: MoeSpec) -> Tensor:
    """The scores, with minus infinity for experts outside the best groups (group-limited routing)."""
    by_group = scores_BSE.unflatten(-1, (moe.num_groups, -1))
    num_counted = 2 if moe.group_score == "top2_sum" else 1
    group_scores = by_group.topk(num_counted, dim=-1).values.sum(-1)
    best = group_scores.topk(moe.top_groups, dim=-1).indices
    outside = torch.ones_like(group_scores, dtype=torch.bool).scatter(-1, best, value=False)
    return by_group.masked_fill(outside[..., None], float("-inf")).flatten(-2)


class Capacity(nn.Module):
    """Expert capacity: an expert accepts the first choices of each sequence, up to its limit."""

    def __init__(self, moe: MoeSpec) -> None:
        super().__init__()
        self.moe = moe

    def forward(self, experts_BSC: Tensor) -> Tensor:
        """True where the expert accepts the choice. The limit applies to each sequence."""
        factor = self.moe.capacity_factor
        assert factor is not None
        num_choices = experts_BSC[0].numel()
        limit = max(1, int(factor * num_choices / self.moe.num_experts))
        return _position_in_expert(experts_BSC.flatten(1)).view_as(experts_BSC) < limit


def _position_in_expert(experts_BN: Tensor) -> Tensor:
    """Number of earlier entries of the same row that chose the same expert."""
    order_BN = experts_BN.argsort(dim=1, stable=True)
    sorted_BN = experts_BN.gather(1, order_BN)
    index_BN = torch.arange(experts_BN.shape[1], device=experts_BN.device).expand_as(experts_BN)
    first_BN = torch.searchsorted(sorted_BN, sorted_BN)  # where this expert's run begins
    return torch.empty_like(experts_BN).scatter_(1, order_BN, index_BN - first_BN)


class LoadBalanceLoss(nn.Module):
    """The load-balancing loss, per sequence: E x sum over experts of f x P.

    f is the fraction of the sequence's choices that went to the expert (no gradient), P the mean
    score. Each sequence has its own weight, so the loss does not depend on how the batch is sharded. Where
    ranks share a sequence, `total` sums the counts; P is linear, so its parts add up by themselves.
    """

    def __init__(self, moe: MoeSpec) -> None:
        super().__init__()
        self.moe = moe
        self.total: nn.Module = nn.Identity()

    def forward(self, routing: Routing, sequence_weights_B: Tensor) -> Tensor:
        """A scalar: this rank's part of the loss, coefficient and sequence weights included."""
        scores_BSE = routing.scores_BSE
        if self.moe.score == "sigmoid":
            scores_BSE = scores_BSE / (scores_BSE.sum(-1, keepdim=True) + _TINY)
        counts_BE = self.total(_count_per_sequence(routing.experts_BSC, self.moe.num_experts))
        choices_B1 = counts_BE.sum(-1, keepdim=True).to(scores_BSE.dtype)
        num_tokens_B1 = choices_B1 / self.moe.top_k
        loss_B = (counts_BE / choices_B1 * (scores_BSE.sum(1) / num_tokens_B1)).sum(-1) * self.moe.num_experts
        return (loss_B * sequence_weights_B.to(loss_B.dtype)).sum() * self.moe.aux_loss


def _count_per_sequence(experts_BSC: Tensor, num_experts: int) -> Tensor:
    num_sequences = experts_BSC.shape[0]
    offsets_B11 = torch.arange(num_sequences, device=experts_BSC.device)[:, None, None] * num_experts
    return count_groups(experts_BSC + offsets_B11, num_sequences * num_experts).view(num_sequences, -1)


class InjectLoss(torch.autograd.Function):
    """The identity on x; backward gives the auxiliary loss gradient 1 and updates both records.

    So an auxiliary loss works in any pipeline stage without being passed along. Backward runs exactly
    once per micro-batch, also under recompute, and never in evaluation, so the records count each token once.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, loss: Tensor, counts_E: Tensor, load_E: Tensor, total_loss: Tensor
    ) -> Tensor:
        """x, unchanged."""
        ctx.records = (loss.detach(), counts_E, load_E, total_loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The gradient of x, and 1 for the loss."""
        loss, counts_E, load_E, total_loss = ctx.records
        _record(load_E, total_loss, counts_E, loss, grad)
        return grad, torch.ones_like(loss), None, None, None


@torch.library.custom_op("meshwright::record_routing", mutates_args=("load_E", "total_loss"))
def _record(load_E: Tensor, total_loss: Tensor, counts_E: Tensor, loss: Tensor, grad: Tensor) -> None:
    """Adds to the records. `grad` ties it to backward.

    Without it the compiler computes the sums in forward, as all they need is known there. Of several
    micro-batches in flight, as in a pipeline, only the last one would count.
    """
    del grad
    load_E += counts_E
    total_loss += loss
