"""Head and cross-entropy in one: the logits exist for one chunk of tokens at a time.

    logits[t, V] = x[t, D] W[V, D]^T           for a chunk of t tokens, in the dtype of compute
    loss        += sum_t weight[t] (lse[t] - logits[t, target[t]])
    logits      <- weight[t] (softmax(logits) - onehot(target))       in place: now the gradient
    dx[t, D]     = logits W        dW[V, D] += logits^T x             in float32 (float64 for float64)

The gradients are made in the forward pass, while the logits are there: making these anew in the backward
pass would cost a third more matmul. The vocabulary may be cut over ranks: rank r of n then holds rows
r V/n ... of W, and three numbers per token (highest, sum of exponentials, target's logit) are reduced.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import pad

# Logits alive at once: large enough that adding up dW is small beside the matmuls, small beside activations.
CHUNK_BYTES = 2**30
# Rows of logits that begin off this many elements make every matmul on them slow; the rest is zeros.
ALIGNED_VOCABULARY = 64


class RowKernels(NamedTuple):
    """The two passes over a chunk of logits; compiled, each is one read (and one write)."""

    statistics: Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    to_gradient: Callable[[Tensor, Tensor, Tensor, Tensor], None]


def linear_cross_entropy(
    x_BSD: Tensor,
    weight_VD: Tensor,
    targets_BS: Tensor,
    weights_BS: Tensor,
    *,
    group: ProcessGroup | None = None,
    kernels: RowKernels | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> Tensor:
    """Sum over B and S of weight x (-log softmax(x W^T)[target]): a scalar, float32 or float64.

    The weights carry the mask and the denominator, so nothing is averaged here. A target below 0 counts
    for nothing. With a group, W holds this rank's rows and every rank gets the same scalar and its own
    part of the sum dx; two all-reduces per chunk.
    """
    weights_T = torch.where(targets_BS < 0, 0.0, weights_BS.to(wide_dtype(x_BSD))).flatten()
    settings = _Settings(
        compute_dtype(x_BSD), group, kernels or PLAIN_KERNELS, chunk_bytes, torch.is_grad_enabled()
    )
    return _LinearCrossEntropy.apply(x_BSD, weight_VD, targets_BS.flatten().clamp(min=0), weights_T, settings)  # pyright: ignore[reportReturnType]


def wide_dtype(x: Tensor) -> torch.dtype:
    """The dtype that sums and tables are kept in: float64 for float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def compute_dtype(x: Tensor) -> torch.dtype:
    """What a matmul on x computes in here: autocast's dtype inside it, else that of x."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def row_statistics(logits_TV: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row the highest logit, the sum of exp(logit - highest), and the target's logit; wide."""
    wide_TV = logits_TV.to(wide_dtype(logits_TV))
    highest_T = wide_TV.amax(-1)
    sums_T = (wide_TV - highest_T[:, None]).exp().sum(-1)
    return highest_T, sums_T, wide_TV.gather(-1, targets_T[:, None]).squeeze(-1)


def rows_to_gradient(logits_TV: Tensor, normalisers_T: Tensor, targets_T: Tensor, weights_T: Tensor) -> None:
    """Overwrite logits by weight x (softmax - onehot); a target outside the rows' columns has no onehot."""
    wide_TV = logits_TV.to(normalisers_T.dtype)
    columns_V = torch.arange(logits_TV.shape[1], device=logits_TV.device)
    is_target_TV = columns_V == targets_T[:, None]
    chances_TV = (wide_TV - normalisers_T[:, None]).exp()
    logits_TV.copy_((chances_TV - is_target_TV.to(wide_TV.dtype)) * weights_T[:, None])


PLAIN_KERNELS = RowKernels(row_statistics, rows_to_gradient)


def compiled_kernels() -> RowKernels:
    """The same two passes, fused by the compiler."""
    return RowKernels(
        torch.compile(row_statistics, dynamic=False), torch.compile(rows_to_gradient, dynamic=False)
    )


class _Settings(NamedTuple):
    dtype: torch.dtype
    group: ProcessGroup | None
    kernels: RowKernels
    chunk_bytes: int
    wants_gradient: bool


class _LinearCrossEntropy(torch.autograd.Function):
    """Keeps dx and dW; backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any, x_BSD: Tensor, weight_VD: Tensor, targets_T: Tensor, weights_T: Tensor, how: _Settings
    ) -> Tensor:
        x_TD, weight = x_BSD.flatten(0, -2).to(how.dtype), _aligned(weight_VD.to(how.dtype))
        num_rows = weight_VD.shape[0]
        own_T = targets_T if how.group is None else targets_T - how.group.rank() * num_rows
        dx_TD, dw_VD = torch.empty_like(x_TD), weight.new_empty(weight.shape, dtype=weights_T.dtype)
        loss = weights_T.new_zeros(())
        for part in _chunks(x_TD.shape[0], weight.shape[0] * weight.element_size(), how.chunk_bytes):
            padded_TV = x_TD[part] @ weight.T
            logits_TV = padded_TV[:, :num_rows]
            normalisers_T, chosen_T = _reduced_statistics(logits_TV, own_T[part], how)
            loss += ((normalisers_T - chosen_T) * weights_T[part]).sum()
            if how.wants_gradient:
                how.kernels.to_gradient(logits_TV, normalisers_T, own_T[part], weights_T[part])
                torch.mm(padded_TV, weight, out=dx_TD[part])
                _add_product(dw_VD, padded_TV.T, x_TD[part], is_first=part.start == 0)
        if how.wants_gradient:
            ctx.save_for_backward(dx_TD.view(x_BSD.shape), dw_VD[:num_rows])
            ctx.dtypes = x_BSD.dtype, weight_VD.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        dx_BSD, dw_VD = ctx.saved_tensors
        x_dtype, weight_dtype = ctx.dtypes
        # Not in place: a schedule that splits the backward pass runs this node twice.
        return (dx_BSD * grad).to(x_dtype), (dw_VD * grad).to(weight_dtype), None, None, None


def _aligned(weight_VD: Tensor) -> Tensor:
    """Rows of zeros up to an aligned number of them: their logits are 0 and are never looked at."""
    return pad(weight_VD, (0, 0, 0, -weight_VD.shape[0] % ALIGNED_VOCABULARY))


def _chunks(num_tokens: int, row_bytes: int, chunk_bytes: int) -> Iterator[slice]:
    """Parts of equal size (the last may be shorter), so that one compiled kernel serves all."""
    count = -(-num_tokens * row_bytes // chunk_bytes)
    size = -(-num_tokens // count)
    return (slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size))


def _reduced_statistics(logits_TV: Tensor, own_T: Tensor, how: _Settings) -> tuple[Tensor, Tensor]:
    """Log-sum-exp and target's logit of each token, over the whole vocabulary."""
    is_mine_T = (own_T >= 0) & (own_T < logits_TV.shape[1])
    highest_T, sums_T, chosen_T = how.kernels.statistics(logits_TV, torch.where(is_mine_T, own_T, 0))
    if how.group is None:
        return sums_T.log() + highest_T, chosen_T
    own_highest_T = highest_T.clone()
    dist.all_reduce(highest_T, op=dist.ReduceOp.MAX, group=how.group)
    shifted_T = sums_T * (own_highest_T - highest_T).exp()
    both = torch.stack((shifted_T, (chosen_T - highest_T) * is_mine_T))
    dist.all_reduce(both, group=how.group)
    return both[0].log() + highest_T, both[1] + highest_T


def _add_product(total: Tensor, a: Tensor, b: Tensor, *, is_first: bool) -> None:
    """total += a b, summed in the dtype of the total; the first product overwrites."""
    if a.is_cuda and a.dtype != total.dtype:
        torch.addmm(total, a, b, beta=0 if is_first else 1, out_dtype=total.dtype, out=total)
        return
    product = (a @ b).to(total.dtype)
    total.copy_(product) if is_first else total.add_(product)
