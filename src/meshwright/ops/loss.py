"""Head and cross-entropy in one: the logits exist for one chunk of tokens at a time.

    logits[t, V] = x[t, D] W[V, D]^T           for a chunk of t tokens, in the dtype of compute
    loss        += sum_t weight[t] (lse[t] - logits[t, target[t]])
    logits      <- softmax(logits) - onehot(target)                   in place: now the gradient
    dx[t, D]     = weight[t] logits W
    dW[V, D]    += logits^T (weight[t] x)                             in float32 (float64 for float64)

One pass over the logits computes their sum of exponentials and overwrites them. The factor 1 / sum, known
only after that pass, is applied together with the weight to x and dx, which are small. In fp16 values without
that factor overflow, and a sharded vocabulary (vocab parallel) needs the sums of all ranks first; there the
logits are multiplied by factor and weight. The gradients are computed in forward, while the logits exist:
recomputing the logits in backward would cost a third more matmul time. With the vocabulary sharded over n
ranks, rank r holds rows r V/n ... of W, and three values per token (max, sum of exponentials, target's logit)
are all-reduced.

Rows whose weight is 0 (prompts, padding) are left out where their number is known on the host. A frozen W
gets no dW: neither its matmuls nor its memory. A low-rank update of a frozen W is added to each chunk:

    logits      += u[t, R] B[V, R]^T,   du[t, R] = weight[t] logits B,   dB[V, R] += logits^T (weight[t] u)
"""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import pad

from meshwright.ops.cast import accumulation_dtype, compute_dtype
from meshwright.ops.loss_rows import PLAIN, RowKernels, Statistics

TRITON: RowKernels | None = None
scaled_copy: Callable[[Tensor, Tensor, torch.dtype], Tensor] | None = None
if find_spec("triton") is not None:  # comes with torch for CUDA
    from meshwright.ops.loss_triton import TRITON, scaled_copy

# Bytes of logits at a time: large enough that accumulating dW is cheap beside the matmuls, small beside
# activations.
CHUNK_BYTES = 2**30
# A frozen head accumulates no dW, so its chunks can be smaller: 1,024 tokens of a vocabulary of 128K.
FROZEN_CHUNK_BYTES = 2**28
# The vocabulary is padded with zeros to a multiple of this: unaligned rows make every matmul on the logits
# slow.
ALIGNED_VOCABULARY = 64
# Rows that count are gathered where they are at most this share; their number is padded to a multiple.
MOST_COUNTED = 0.95
ALIGNED_ROWS = 128


class UpdatedHead(NamedTuple):
    """A head's weight with a low-rank update: its logits are x W^T + u B^T."""

    weight_VD: Tensor
    u_BSR: Tensor
    b_VR: Tensor


def linear_cross_entropy(
    x_BSD: Tensor,
    weight_VD: Tensor | UpdatedHead,
    targets_BS: Tensor,
    weights_BS: Tensor,
    *,
    group: ProcessGroup | None = None,
    kernels: RowKernels | None = None,
    chunk_bytes: int | None = None,
    num_counted: int | None = None,
) -> Tensor:
    """Sum over B and S of weight x (-log softmax(x W^T)[target]): a scalar, float32 or float64.

    The weights hold the mask and the denominator, so nothing is averaged here. Targets below 0 are ignored.
    With a group, W holds this rank's rows, every rank gets the same scalar, and dx is partial: a term of the
    sum over ranks; du is partial too. Two all-reduces per chunk. At most `num_counted`
    weights are not 0; None: any number.
    """
    weight_VD, u_TR, b_VR = _parts(weight_VD)
    weights_T = torch.where(targets_BS < 0, 0.0, weights_BS.to(accumulation_dtype(x_BSD))).flatten()
    targets_T, x_TD = targets_BS.flatten().clamp(min=0), x_BSD.flatten(0, -2)
    rows_N = counted_rows(weights_T, num_counted)
    if rows_N is not None:
        x_TD, targets_T, weights_T = (each.index_select(0, rows_N) for each in (x_TD, targets_T, weights_T))
        u_TR = None if u_TR is None else u_TR.index_select(0, rows_N)
    settings = _Settings(
        compute_dtype(x_BSD),
        group,
        kernels or choose_row_kernels(x_BSD),
        chunk_bytes or (CHUNK_BYTES if weight_VD.requires_grad else FROZEN_CHUNK_BYTES),
        torch.is_grad_enabled(),
    )
    return _LinearCrossEntropy.apply(x_TD, weight_VD, targets_T, weights_T, settings, u_TR, b_VR)  # pyright: ignore[reportReturnType]


def _parts(head: Tensor | UpdatedHead) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(W, u_TR, B) of a head; without an update the last two are None."""
    if isinstance(head, UpdatedHead):
        return head.weight_VD, head.u_BSR.flatten(0, -2), head.b_VR
    return head, None, None


@torch.no_grad()
def linear_log_probs(
    x_BSD: Tensor,
    weight_VD: Tensor | UpdatedHead,
    targets_BS: Tensor,
    weights_BS: Tensor,
    *,
    group: ProcessGroup | None = None,
    kernels: RowKernels | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    num_counted: int | None = None,
) -> Tensor:
    """log softmax(x W^T)[target] of each token whose weight is not 0, else 0: fp32 or fp64, no gradient.

    The arguments are those of `linear_cross_entropy`.
    """
    weight_VD, u_TR, b_VR = _parts(weight_VD)
    weights_T = torch.where(targets_BS < 0, 0.0, weights_BS.to(accumulation_dtype(x_BSD))).flatten()
    rows_N = counted_rows(weights_T, num_counted)
    rows_N = torch.arange(len(weights_T), device=weights_T.device) if rows_N is None else rows_N
    dtype = compute_dtype(x_BSD)
    weight, num_rows = _aligned(weight_VD.to(dtype)), weight_VD.shape[0]
    first = 0 if group is None else group.rank() * num_rows
    x_TD, targets_T = x_BSD.flatten(0, -2), targets_BS.flatten().clamp(min=0)
    log_probs_T, passes = torch.zeros_like(weights_T), kernels or choose_row_kernels(x_BSD)
    for part in _chunks(len(rows_N), weight.shape[0] * weight.element_size(), chunk_bytes):
        here = rows_N[part]
        logits_TV = (x_TD[here].to(dtype) @ weight.T)[:, :num_rows]
        if u_TR is not None and b_VR is not None:
            logits_TV.addmm_(u_TR[here].to(dtype), b_VR.to(dtype).T)
        found = passes.statistics(logits_TV, targets_T[here] - first)
        del logits_TV  # before those of the next chunk are allocated
        lse_T, target_logit_T = _reduce_statistics(found, group)
        log_probs_T[here] = (target_logit_T - lse_T).to(log_probs_T.dtype)
    return torch.where(weights_T == 0, 0.0, log_probs_T).view(targets_BS.shape)


def counted_rows(weights_T: Tensor, num_counted: int | None) -> Tensor | None:
    """The rows whose weight is not 0, in order, and some others; None where leaving rows out does not pay."""
    if num_counted is None:
        return None
    wanted = max(1, -(-num_counted // ALIGNED_ROWS)) * ALIGNED_ROWS
    if wanted > MOST_COUNTED * len(weights_T):
        return None
    return torch.argsort((weights_T == 0).to(torch.uint8), stable=True)[:wanted]


def choose_row_kernels(logits: Tensor) -> RowKernels:
    """The Triton kernels where they run, else the plain ones."""
    return TRITON if TRITON is not None and logits.is_cuda and logits.dtype != torch.float64 else PLAIN


class _Settings(NamedTuple):
    dtype: torch.dtype
    group: ProcessGroup | None
    kernels: RowKernels
    chunk_bytes: int
    wants_gradient: bool


class _Chunk(NamedTuple):
    """The tensors that a chunk of tokens reads, and those that it writes its gradients to."""

    x_TD: Tensor
    weight_VD: Tensor
    targets_T: Tensor
    weights_T: Tensor
    dx_TD: Tensor
    dw_VD: Tensor | None
    update: "_Update | None"


class _Update(NamedTuple):
    """The factors of a low-rank update of the weight, and their gradients."""

    u_TR: Tensor
    b_VR: Tensor
    du_TR: Tensor
    db_VR: Tensor


class _LinearCrossEntropy(torch.autograd.Function):
    """Forward computes dx and dW and saves them; backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        rows_TD: Tensor,
        weight_VD: Tensor,
        targets_T: Tensor,
        weights_T: Tensor,
        settings: _Settings,
        u_TR: Tensor | None,
        b_VR: Tensor | None,
    ) -> Tensor:
        x_TD, weight = rows_TD.to(settings.dtype), _aligned(weight_VD.to(settings.dtype))
        num_rows = weight_VD.shape[0]
        local_T = targets_T if settings.group is None else targets_T - settings.group.rank() * num_rows
        dx_TD, dw_VD = torch.empty_like(x_TD), None
        if ctx.needs_input_grad[1]:
            dw_VD = weight.new_empty(weight.shape, dtype=weights_T.dtype)
        loss = weights_T.new_zeros(())
        update = None if u_TR is None or b_VR is None else _new_update(u_TR, b_VR, settings.dtype)
        chunk = _Chunk(x_TD, weight, local_T, weights_T, dx_TD, dw_VD, update)
        for part in _chunks(x_TD.shape[0], weight.shape[0] * weight.element_size(), settings.chunk_bytes):
            loss += _chunk_loss(chunk, part, num_rows, settings)
        if settings.wants_gradient:
            of_update = (None, None) if update is None else (update.du_TR, update.db_VR)
            ctx.save_for_backward(dx_TD, None if dw_VD is None else dw_VD[:num_rows], *of_update)
            ctx.dtypes = [None if one is None else one.dtype for one in (rows_TD, weight_VD, u_TR, b_VR)]
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        # Not in place: a schedule that splits the backward pass runs this node twice.
        pairs = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        dx_TD, dw_VD, du_TR, db_VR = (
            None if one is None else _scaled(one, grad, dtype) for one, dtype in pairs
        )
        return dx_TD, dw_VD, None, None, None, du_TR, db_VR


def _new_update(u_TR: Tensor, b_VR: Tensor, dtype: torch.dtype) -> _Update:
    """The factors in `dtype`, and memory for their gradients; dB is accumulated over chunks in fp32."""
    db_VR = torch.zeros_like(b_VR, dtype=accumulation_dtype(b_VR))
    return _Update(u_TR.to(dtype), b_VR.to(dtype), torch.empty_like(u_TR, dtype=dtype), db_VR)


def _chunk_loss(tensors: _Chunk, part: slice, num_rows: int, settings: _Settings) -> Tensor:
    """The loss of a chunk of tokens; writes dx and accumulates dW.

    A function of its own, so that its logits are freed before those of the next chunk are allocated.
    """
    x_TD, weight, targets_T, weights_T, dx_TD, dw_VD, update = tensors
    padded_TV = x_TD[part] @ weight.T
    logits_TV = padded_TV[:, :num_rows]
    if update is not None:
        logits_TV.addmm_(update.u_TR[part], update.b_VR.T)
    losses_T, scales_T1 = _losses_and_gradient(logits_TV, targets_T[part], weights_T[part], settings)
    if settings.wants_gradient:
        if dw_VD is not None:
            # The scaled x is written to the memory of dx, which is not computed yet.
            scaled_TD = x_TD[part] if scales_T1 is None else torch.mul(x_TD[part], scales_T1, out=dx_TD[part])
            settings.kernels.accumulate(dw_VD, padded_TV.T, scaled_TD, part.start == 0)
        torch.mm(padded_TV, weight, out=dx_TD[part])
        if scales_T1 is not None:
            dx_TD[part].mul_(scales_T1)
        if update is not None:
            _update_gradients(update, part, logits_TV, scales_T1)
    return (losses_T * weights_T[part]).sum()


def _update_gradients(update: _Update, part: slice, logits_TV: Tensor, scales_T1: Tensor | None) -> None:
    """Write du of a chunk, and accumulate dB; the logits are the gradient up to a factor per token."""
    u_TR, du_TR = update.u_TR[part], update.du_TR[part]
    torch.mm(logits_TV, update.b_VR, out=du_TR)
    if scales_T1 is not None:
        du_TR.mul_(scales_T1)
        u_TR = (u_TR * scales_T1).to(u_TR.dtype)
    update.db_VR.add_(logits_TV.T @ u_TR)


def _aligned(weight_VD: Tensor) -> Tensor:
    """W padded with zero rows to an aligned number of rows; the logits of the padding are never read."""
    missing = -weight_VD.shape[0] % ALIGNED_VOCABULARY
    return pad(weight_VD, (0, 0, 0, missing)) if missing else weight_VD  # padding by 0 rows would still copy


def _chunks(num_tokens: int, row_bytes: int, chunk_bytes: int) -> Iterator[slice]:
    """Token slices of equal size (the last may be shorter), so that one compiled kernel serves all."""
    count = -(-num_tokens * row_bytes // chunk_bytes)
    size = -(-num_tokens // count)
    return (slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size))


def _losses_and_gradient(
    logits_TV: Tensor, local_T: Tensor, weights_T: Tensor, settings: _Settings
) -> tuple[Tensor, Tensor | None]:
    """The loss of each token, and a factor per token; the logits become the gradient up to that factor."""
    if settings.wants_gradient and settings.group is None and settings.dtype != torch.float16:
        found = settings.kernels.unscaled_gradient(logits_TV, local_T)
        losses_T = found.sum_exp_T.log() + found.max_T - found.target_logit_T
        return losses_T, (weights_T / found.sum_exp_T)[:, None]
    lse_T, target_logit_T = _reduce_statistics(
        settings.kernels.statistics(logits_TV, local_T), settings.group
    )
    if settings.wants_gradient:
        settings.kernels.to_gradient(logits_TV, lse_T, local_T, weights_T)
    return lse_T - target_logit_T, None


def _scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """x times a factor, rounded once to `dtype`, without an fp32 copy in between."""
    if x.is_cuda and x.dtype != dtype and x.dtype != torch.float64 and scaled_copy is not None:
        return scaled_copy(x.contiguous(), factor, dtype)
    return torch.mul(x, factor, out=x.new_empty(x.shape, dtype=dtype))


def _reduce_statistics(found: Statistics, group: ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Log-sum-exp and target's logit of each token over the full vocabulary; one rank has the target."""
    if group is None:
        return found.sum_exp_T.log() + found.max_T, found.target_logit_T
    max_T = found.max_T.clone()
    dist.all_reduce(max_T, op=dist.ReduceOp.MAX, group=group)
    both = torch.stack((found.sum_exp_T * (found.max_T - max_T).exp(), found.target_logit_T))
    dist.all_reduce(both, group=group)
    return both[0].log() + max_T, both[1]
