"""Causal attention over any rows of a sequence, part by part of the keys, with one exact (online) softmax.

    out[b,s,h,:] = sum_t P[b,h,s,t] v[b,t,g(h),:]      P = exp(scale q.k - lse) where s sees t, else 0
    lse[b,h,s]   = log sum_{t seen by s} exp(scale q[b,s,h,:].k[b,t,g(h),:])

Row s sees row t when t <= s in the sequence, s - t < window, and both belong to one document. Parts of the
keys give parts (out_i, lse_i), merged by  lse = logaddexp(lse_1, lse_2),  out = sum_i exp(lse_i - lse) out_i.
The backward needs only the merged out and lse, so it too runs part by part, in any order:

    dV += P^T dO     dS = P * (dO V^T - rowsum(dO * out))     dQ += scale dS K     dK += scale dS^T Q

Without documents and window there is no mask: kernel calls are full or causal. Separate documents (document
masking, varlen) become segments of the rows of these calls, and pairs of other documents are skipped. With a
window, or where segments have no kernel, calls read an additive bias, built for one band of queries at a time
and only over the keys that causality and window allow.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.hardware.simulated_device import SimulatedDevice
from meshwright.ops.attention_aten import Kernel, SdpaArgs, choose_kernel, masked_score
from meshwright.ops.attention_tasks import Chunk, Coverage, Task, Tiling, plan_tasks
from meshwright.ops.cast import cast
from meshwright.ops.documents import Documents, Segments, rows_before
from meshwright.ops.varlen_attention import VARLEN

TILING = Tiling()


class Rows(NamedTuple):
    """Positions of rows in the sequence, as chunks, and the document of each row where a mask is read."""

    chunks: tuple[Chunk, ...]
    documents_BS: Tensor | None = None


class AttentionScope(NamedTuple):
    """Which keys each query sees, and the softmax scale."""

    queries: Rows
    keys: Rows
    scale: float
    window: int | None = None
    simulated: SimulatedDevice | None = None
    """The device whose kernels are chosen; None: that of the queries."""
    documents: Documents | None = None
    """Documents of the full sequences, where segments take the place of a mask."""
    sequence_length: int = 0
    """Positions of the full sequences, for `documents`."""


def full_sequence(length: int, documents_BS: Tensor | None = None) -> Rows:
    """All rows of a sequence of this length."""
    return Rows((Chunk(0, length),), documents_BS)


def attend(q_BSHK: Tensor, k_BTGK: Tensor, v_BTGV: Tensor, scope: AttentionScope) -> Tensor:
    """out_BSHV, with gradients to q, k and v; S and T count local rows. Does not communicate."""
    return _Attend.apply(q_BSHK, k_BTGK, v_BTGV, scope)  # pyright: ignore[reportReturnType]


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scope: AttentionScope) -> Tensor:
        running = RunningSoftmax(q, v.shape[-1])
        forward_part(running, q, k, v, scope)
        out = cast(running.out_BSHV, q.dtype)
        ctx.scope = scope
        ctx.save_for_backward(q, k, v, out, running.lse_BHS)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, out, lse = ctx.saved_tensors
        dq = torch.zeros_like(q, dtype=lse.dtype)
        dk, dv = backward_part(SavedQueries(q, out, lse, grad), k, v, ctx.scope, dq)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


class RunningSoftmax:
    """The merged (out, lse) of the keys seen so far (online softmax), in fp32 or fp64."""

    def __init__(self, q_BSHK: Tensor, value_width: int) -> None:
        batch, length, heads, _ = q_BSHK.shape
        dtype = torch.promote_types(q_BSHK.dtype, torch.float32)
        self.out_BSHV = q_BSHK.new_zeros((batch, length, heads, value_width), dtype=dtype)
        self.lse_BHS = q_BSHK.new_full((batch, heads, length), masked_score(dtype), dtype=dtype)

    def merge(self, rows: slice, out_BSHV: Tensor, lse_BHS: Tensor) -> None:
        """Merge the result of these rows over another part of the keys."""
        out, lse = self.out_BSHV[:, rows], self.lse_BHS[:, :, rows]
        share = torch.sigmoid(lse_BHS - lse).transpose(1, 2).unsqueeze(-1)
        out.lerp_(out_BSHV.to(out.dtype), share)
        lse.copy_(torch.logaddexp(lse, lse_BHS))


def forward_part(running: RunningSoftmax, q: Tensor, k: Tensor, v: Tensor, scope: AttentionScope) -> None:
    """Attend to one part of the keys and merge the result."""
    for task in _tasks(q.shape[0], scope):
        q_task, k_task, v_task = _heads_first(q[:, task.queries], k[:, task.keys], v[:, task.keys])
        args = _sdpa_args(task, scope, q)
        kernel = _kernel(q_task, v_task, args, scope)
        out_BHSV, lse_BHS = kernel.forward(q_task, k_task, v_task, args)
        running.merge(task.queries, out_BHSV.transpose(1, 2), lse_BHS)


class SavedQueries(NamedTuple):
    """What backward needs of the queries: their merged (out, lse) and the gradient of out."""

    q_BSHK: Tensor
    out_BSHV: Tensor
    lse_BHS: Tensor
    grad_BSHV: Tensor


def backward_part(
    queries: SavedQueries, k: Tensor, v: Tensor, scope: AttentionScope, dq: Tensor
) -> tuple[Tensor, Tensor]:
    """Add one part of the keys to dq, and return dk and dv of that part; all in fp32 or fp64."""
    dk, dv = (torch.zeros_like(x, dtype=dq.dtype) for x in (k, v))
    for task in _tasks(k.shape[0], scope):
        k_task, v_task = _heads_first(k[:, task.keys], v[:, task.keys])
        q_task, out_task, grad_task = _heads_first(
            *(x[:, task.queries] for x in (queries.q_BSHK, queries.out_BSHV, queries.grad_BSHV))
        )
        args = _sdpa_args(task, scope, queries.q_BSHK)
        kernel = _kernel(q_task, v_task, args, scope)
        lse_task = queries.lse_BHS[:, :, task.queries].contiguous()
        grads = kernel.backward(grad_task, q_task, k_task, v_task, out_task, lse_task, args)
        for total, rows, part in zip((dq, dk, dv), (task.queries, task.keys, task.keys), grads, strict=True):
            total[:, rows] += part.transpose(1, 2)
    return dk, dv


def _kernel(q: Tensor, v: Tensor, args: SdpaArgs, scope: AttentionScope) -> Kernel:
    if args.segments is not None:
        return VARLEN
    return choose_kernel(q, v, has_bias=args.bias_B1ST is not None, simulated=scope.simulated)


def _heads_first(*tensors_BSHK: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in tensors_BSHK]


def _tasks(batch: int, scope: AttentionScope) -> tuple[Task, ...]:
    return plan_tasks(
        scope.queries.chunks,
        scope.keys.chunks,
        window=scope.window,
        has_documents=scope.queries.documents_BS is not None,
        tiling=TILING._replace(max_elements=TILING.max_elements // batch),
    )


def _sdpa_args(task: Task, scope: AttentionScope, like: Tensor) -> SdpaArgs:
    if scope.documents is not None:
        return SdpaArgs(scope.scale, segments=_segments(task, scope, scope.documents))
    if task.coverage is not Coverage.MASKED:
        return SdpaArgs(scope.scale, causal=task.coverage is Coverage.CAUSAL)
    seen_BST = visible(scope, task.queries, task.keys, like.device)
    bias_BST = like.new_zeros((like.shape[0], *seen_BST.shape[1:])).masked_fill_(
        ~seen_BST, masked_score(like.dtype)
    )
    return SdpaArgs(scope.scale, bias_B1ST=bias_BST.unsqueeze(1))


def _segments(task: Task, scope: AttentionScope, documents: Documents) -> Segments:
    offsets, length = documents.offsets_P, scope.sequence_length
    is_causal = task.coverage is Coverage.CAUSAL
    queries = rows_before(offsets, length, scope.queries.chunks, task.queries)
    keys = queries if is_causal else rows_before(offsets, length, scope.keys.chunks, task.keys)
    return Segments(queries, keys, documents.longest_1, is_causal)


def visible(scope: AttentionScope, queries: slice, keys: slice, device: torch.device) -> Tensor:
    """seen_BST (B is 1 without documents): True where a query row sees a key row."""
    s_S1 = _positions(scope.queries.chunks, device)[queries].unsqueeze(1)
    t_1T = _positions(scope.keys.chunks, device)[keys].unsqueeze(0)
    seen_BST = (t_1T <= s_S1).unsqueeze(0)
    if scope.window is not None:
        seen_BST = seen_BST & (s_S1 - t_1T < scope.window)
    query_documents, key_documents = scope.queries.documents_BS, scope.keys.documents_BS
    if query_documents is not None and key_documents is not None:
        same_BST = query_documents[:, queries].unsqueeze(2) == key_documents[:, keys].unsqueeze(1)
        seen_BST = seen_BST & same_BST
    return seen_BST


def _positions(chunks: tuple[Chunk, ...], device: torch.device) -> Tensor:
    return torch.cat([torch.arange(chunk.start, chunk.end, device=device) for chunk in chunks])
