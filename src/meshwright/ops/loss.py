"""Cross-entropy as a weighted sum over tokens, with the wide copy of the logits only ever in chunks."""

from typing import Any

import torch
from torch import Tensor

# Tokens whose logits are widened at once: large enough to fill a device, small beside the logits.
CHUNK_TOKENS = 2048


def weighted_cross_entropy(
    logits_BSV: Tensor, targets_BS: Tensor, weights_BS: Tensor, *, chunk_tokens: int = CHUNK_TOKENS
) -> Tensor:
    """Sum over B and S of weight x (-log softmax(logits)[target]): a scalar, float32 or float64.

    The weights carry the mask and the denominator, so nothing is averaged here. A target below 0
    counts for nothing. Softmax and sum are float32 whatever the logits are (float64 for float64).
    """
    logits_TV = logits_BSV.flatten(0, -2)
    wide = wide_dtype(logits_BSV)
    targets_T, weights_T = targets_BS.flatten(), weights_BS.flatten().to(wide)
    weights_T = torch.where(targets_T < 0, 0.0, weights_T)
    return _WeightedCrossEntropy.apply(logits_TV, targets_T.clamp(min=0), weights_T, chunk_tokens)


def wide_dtype(x: Tensor) -> torch.dtype:
    """The dtype that sums and tables are kept in: float64 for float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class _WeightedCrossEntropy(torch.autograd.Function):
    """Keeps the logits as they came and one log-sum-exp per token; the softmax is made again backward."""

    @staticmethod
    def forward(
        ctx: Any, logits_TV: Tensor, targets_T: Tensor, weights_T: Tensor, chunk_tokens: int
    ) -> Tensor:
        normalisers_T = torch.empty_like(weights_T)
        loss = weights_T.new_zeros(())
        for start in range(0, len(targets_T), chunk_tokens):
            part = slice(start, start + chunk_tokens)
            wide_TV = logits_TV[part].to(weights_T.dtype)
            normalisers_T[part] = wide_TV.logsumexp(-1)
            chosen_T = wide_TV.gather(-1, targets_T[part, None]).squeeze(-1)
            loss += ((normalisers_T[part] - chosen_T) * weights_T[part]).sum()
        ctx.save_for_backward(logits_TV, targets_T, weights_T, normalisers_T)
        ctx.chunk_tokens = chunk_tokens
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        logits_TV, targets_T, weights_T, normalisers_T = ctx.saved_tensors
        grad_TV = torch.empty_like(logits_TV)
        scale_T1 = (weights_T * grad)[:, None]
        for start in range(0, len(targets_T), ctx.chunk_tokens):
            part = slice(start, start + ctx.chunk_tokens)
            wide_TV = (logits_TV[part].to(weights_T.dtype) - normalisers_T[part, None]).exp_()
            wide_TV *= scale_T1[part]
            wide_TV.scatter_add_(-1, targets_T[part, None], -scale_T1[part])
            grad_TV[part] = wide_TV
        return grad_TV, None, None, None
