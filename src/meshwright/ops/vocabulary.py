"""Embedding lookup and cross-entropy where the vocabulary is cut over ranks.

Rank r of n holds rows r V/n ... (r+1) V/n of the table. Neither the table nor the logits are ever gathered:
the lookup sums rows of which one rank has the true one, and the loss needs three numbers per token.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional

from meshwright.ops.loss import wide_dtype


def partial_lookup(ids_BS: Tensor, table_VD: Tensor, group: ProcessGroup) -> Tensor:
    """x{n}[B, S, D]: this rank's rows, zeros for ids of other ranks; the sum over ranks is the lookup."""
    local_BS, is_mine_BS = _to_local(ids_BS, table_VD.shape[0], group)
    return functional.embedding(local_BS, table_VD) * is_mine_BS[..., None]


def cut_cross_entropy(
    logits_BSV: Tensor, targets_BS: Tensor, weights_BS: Tensor, group: ProcessGroup
) -> Tensor:
    """Sum of weight x cross-entropy, the same scalar on every rank; logits[B, S, V_n] stay where they are.

    Two all-reduces: the maximum, then sum of exponentials and target logit together: 3 numbers per token.
    """
    wide = wide_dtype(logits_BSV)
    weights_BS = torch.where(targets_BS < 0, 0.0, weights_BS.to(wide))
    return _CutCrossEntropy.apply(logits_BSV, targets_BS.clamp(min=0), weights_BS, group)


def _to_local(ids_BS: Tensor, num_rows: int, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    shifted = ids_BS - group.rank() * num_rows
    is_mine = (shifted >= 0) & (shifted < num_rows)
    return torch.where(is_mine, shifted, 0), is_mine


class _CutCrossEntropy(torch.autograd.Function):
    """Keeps the logits as they came and one log-sum-exp per token; the softmax is made again backward."""

    @staticmethod
    def forward(
        ctx: Any, logits_BSV: Tensor, targets_BS: Tensor, weights_BS: Tensor, group: ProcessGroup
    ) -> Tensor:
        wide_BSV = logits_BSV.to(weights_BS.dtype)
        highest_BS = wide_BSV.amax(-1)
        dist.all_reduce(highest_BS, op=dist.ReduceOp.MAX, group=group)
        local_BS, is_mine_BS = _to_local(targets_BS, logits_BSV.shape[-1], group)
        chosen_BS = wide_BSV.gather(-1, local_BS[..., None]).squeeze(-1) - highest_BS
        sums = torch.stack(((wide_BSV - highest_BS[..., None]).exp().sum(-1), chosen_BS * is_mine_BS))
        dist.all_reduce(sums, group=group)
        normalisers_BS = sums[0].log() + highest_BS
        ctx.save_for_backward(logits_BSV, local_BS, is_mine_BS, weights_BS, normalisers_BS)
        return ((sums[0].log() - sums[1]) * weights_BS).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        logits_BSV, local_BS, is_mine_BS, weights_BS, normalisers_BS = ctx.saved_tensors
        scale_BS1 = (weights_BS * grad)[..., None]
        grad_BSV = (logits_BSV.to(weights_BS.dtype) - normalisers_BS[..., None]).exp_() * scale_BS1
        grad_BSV.scatter_add_(-1, local_BS[..., None], -scale_BS1 * is_mine_BS[..., None])
        return grad_BSV.to(logits_BSV.dtype), None, None, None
