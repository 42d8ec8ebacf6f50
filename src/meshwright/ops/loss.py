"""Head and cross-entropy in one: the logits exist for one chunk of tokens at a time.

    logits[t, V] = x[t, D] W[V, D]^T           for a chunk of t tokens, in the dtype of compute
    loss        += sum_t weight[t] (lse[t] - logits[t, target[t]])
    logits      <- softmax(logits) - onehot(target)                   in place: now the gradient
    dx[t, D]     = weight[t] logits W
    dW[V, D]    += logits^T (weight[t] x)                             in float32 (float64 for float64)

One pass over the logits finds their sum of exponentials and overwrites them; the factor 1 / sum, known
afterwards, joins the weight beside x and dx, which are small. fp16 has no room for numbers without that
factor, and a cut vocabulary needs the sums of all ranks first: there the logits get factor and weight. The
gradients are made in the forward pass, while the logits are there: making these anew in the backward
pass would cost a third more matmul. The vocabulary may be cut over ranks: rank r of n then holds rows
r V/n ... of W, and three numbers per token (highest, sum of exponentials, target's logit) are reduced.
"""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import pad

from meshwright.ops.loss_rows import PLAIN, RowKernels, Statistics, wide_dtype

TRITON: RowKernels | None = None
scaled_copy: Callable[[Tensor, Tensor, torch.dtype], Tensor] | None = None
if find_spec("triton") is not None:  # comes with torch for CUDA
    from meshwright.ops.loss_triton import TRITON, scaled_copy

# Logits alive at once: large enough that adding up dW is small beside the matmuls, small beside activations.
CHUNK_BYTES = 2**30
# Rows of logits that begin off this many elements make every matmul on them slow; the rest is zeros.
ALIGNED_VOCABULARY = 64


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
        compute_dtype(x_BSD), group, kernels or row_kernels(x_BSD), chunk_bytes, torch.is_grad_enabled()
    )
    return _LinearCrossEntropy.apply(x_BSD, weight_VD, targets_BS.flatten().clamp(min=0), weights_T, settings)  # pyright: ignore[reportReturnType]


def compute_dtype(x: Tensor) -> torch.dtype:
    """What a matmul on x computes in here: autocast's dtype inside it, else that of x."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def row_kernels(logits: Tensor) -> RowKernels:
    """The fast ones where they run."""
    return TRITON if TRITON is not None and logits.is_cuda and logits.dtype != torch.float64 else PLAIN


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
            losses_T, scales_T1 = _losses_and_gradient(logits_TV, own_T[part], weights_T[part], how)
            loss += (losses_T * weights_T[part]).sum()
            if how.wants_gradient:
                # x with its factors lies where dx will: no memory of its own.
                scaled_TD = x_TD[part]
                if scales_T1 is not None:
                    scaled_TD = torch.mul(scaled_TD, scales_T1, out=dx_TD[part])
                how.kernels.accumulate(dw_VD, padded_TV.T, scaled_TD, part.start == 0)
                torch.mm(padded_TV, weight, out=dx_TD[part])
                if scales_T1 is not None:
                    dx_TD[part].mul_(scales_T1)
        if how.wants_gradient:
            ctx.save_for_backward(dx_TD.view(x_BSD.shape), dw_VD[:num_rows])
            ctx.dtypes = x_BSD.dtype, weight_VD.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        dx_BSD, dw_VD = ctx.saved_tensors
        x_dtype, weight_dtype = ctx.dtypes
        # Not in place: a schedule that splits the backward pass runs this node twice.
        return _times(dx_BSD, grad, x_dtype), _times(dw_VD, grad, weight_dtype), None, None, None


def _aligned(weight_VD: Tensor) -> Tensor:
    """Rows of zeros up to an aligned number of them: their logits are 0 and are never looked at."""
    missing = -weight_VD.shape[0] % ALIGNED_VOCABULARY
    return pad(weight_VD, (0, 0, 0, missing)) if missing else weight_VD  # no rows would still be a copy


def _chunks(num_tokens: int, row_bytes: int, chunk_bytes: int) -> Iterator[slice]:
    """Parts of equal size (the last may be shorter), so that one compiled kernel serves all."""
    count = -(-num_tokens * row_bytes // chunk_bytes)
    size = -(-num_tokens // count)
    return (slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size))


def _losses_and_gradient(
    logits_TV: Tensor, own_T: Tensor, weights_T: Tensor, how: _Settings
) -> tuple[Tensor, Tensor | None]:
    """The loss of each token; the logits are the gradient afterwards, if one is wanted, but for a factor."""
    if how.wants_gradient and how.group is None and how.dtype != torch.float16:
        found = how.kernels.unscaled_gradient(logits_TV, own_T)
        losses_T = found.sums_T.log() + found.highest_T - found.chosen_T
        return losses_T, (weights_T / found.sums_T)[:, None]
    normalisers_T, chosen_T = _over_ranks(how.kernels.statistics(logits_TV, own_T), how.group)
    if how.wants_gradient:
        how.kernels.to_gradient(logits_TV, normalisers_T, own_T, weights_T)
    return normalisers_T - chosen_T, None


def _times(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """x times a factor, rounded once to `dtype`; nothing wider is written in between."""
    if x.is_cuda and x.dtype != dtype and x.dtype != torch.float64 and scaled_copy is not None:
        return scaled_copy(x.contiguous(), factor, dtype)
    return torch.mul(x, factor, out=x.new_empty(x.shape, dtype=dtype))


def _over_ranks(found: Statistics, group: ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Log-sum-exp and target's logit of each token over the whole vocabulary; one rank has the target."""
    if group is None:
        return found.sums_T.log() + found.highest_T, found.chosen_T
    highest_T = found.highest_T.clone()
    dist.all_reduce(highest_T, op=dist.ReduceOp.MAX, group=group)
    both = torch.stack((found.sums_T * (found.highest_T - highest_T).exp(), found.chosen_T))
    dist.all_reduce(both, group=group)
    return both[0].log() + highest_T, both[1]
