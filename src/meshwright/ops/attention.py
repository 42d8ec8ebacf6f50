"""Causal attention over rows that lie anywhere in the sequence, part by part, with one exact softmax.

    out[b,s,h,:] = sum_t P[b,h,s,t] v[b,t,g(h),:]      P = exp(scale q.k - lse) where s sees t, else 0
    lse[b,h,s]   = log sum_{t seen by s} exp(scale q[b,s,h,:].k[b,t,g(h),:])

s sees t when t <= s in the true sequence, s - t < window, and both are of one document. Parts of the
keys give parts (out_i, lse_i), merged by  lse = logaddexp(lse_1, lse_2),  out = sum_i exp(lse_i - lse) out_i.
The backward needs only the merged out and lse, so it too runs part by part, in any order:

    dV += P^T dO     dS = P * (dO V^T - rowsum(dO * out))     dQ += scale dS K     dK += scale dS^T Q

Without documents and window no mask exists anywhere: full and triangular calls only. With them, calls
read an additive bias, made for one band of queries at a time and only over the keys it can reach by
order and window; keys of other documents in that reach are computed and weigh nothing.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.hardware.simulated_device import SimulatedDevice
from meshwright.ops.attention_aten import Kernel, Rule, choose_kernel
from meshwright.ops.attention_tasks import Chunk, Cover, Task, Tiling, plan_tasks
from meshwright.ops.cast import cast

TILING = Tiling()


class Rows(NamedTuple):
    """Where rows of a sequence lie in it, and the document each belongs to."""

    chunks: tuple[Chunk, ...]
    documents_BS: Tensor | None = None


class Scope(NamedTuple):
    """Who may see whom."""

    queries: Rows
    keys: Rows
    scale: float
    window: int | None = None
    simulated: SimulatedDevice | None = None
    """The device whose kernels are chosen; None: that of the queries."""


def whole_sequence(length: int, documents_BS: Tensor | None = None) -> Rows:
    """All rows of a sequence, in order."""
    return Rows((Chunk(0, length),), documents_BS)


def attend(q_BSHK: Tensor, k_BTGK: Tensor, v_BTGV: Tensor, scope: Scope) -> Tensor:
    """out_BSHV, with gradients to all three; S and T count the rows that lie here. Local: no collective."""
    return _Attend.apply(q_BSHK, k_BTGK, v_BTGV, scope)  # pyright: ignore[reportReturnType]


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scope: Scope) -> Tensor:
        running = RunningSoftmax(q, v.shape[-1])
        add_part(running, q, k, v, scope)
        out = cast(running.out_BSHV, q.dtype)
        ctx.scope = scope
        ctx.save_for_backward(q, k, v, out, running.lse_BHS)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, out, lse = ctx.saved_tensors
        dq = torch.zeros_like(q, dtype=lse.dtype)
        dk, dv = part_backward(QuerySide(q, out, lse, grad), k, v, ctx.scope, dq)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


class RunningSoftmax:
    """The merged (out, lse) of the keys seen so far, in fp32 or better."""

    def __init__(self, q_BSHK: Tensor, value_width: int) -> None:
        batch, length, heads, _ = q_BSHK.shape
        wide = torch.promote_types(q_BSHK.dtype, torch.float32)
        self.out_BSHV = q_BSHK.new_zeros((batch, length, heads, value_width), dtype=wide)
        self.lse_BHS = q_BSHK.new_full((batch, heads, length), unseen(wide), dtype=wide)

    def merge(self, rows: slice, out_BSHV: Tensor, lse_BHS: Tensor) -> None:
        """Add what these rows saw in another part of the keys."""
        out, lse = self.out_BSHV[:, rows], self.lse_BHS[:, :, rows]
        share = torch.sigmoid(lse_BHS - lse).transpose(1, 2).unsqueeze(-1)
        out.lerp_(out_BSHV.to(out.dtype), share)
        lse.copy_(torch.logaddexp(lse, lse_BHS))


def unseen(dtype: torch.dtype) -> float:
    """The score of a pair that must not see each other.

    Finite, because a row whose part holds nothing visible then gets this as its log-sum-exp and weighs
    exactly 0 in the merge; with -inf the kernels disagree (the CPU one answers 0, others nan).
    """
    return torch.finfo(dtype).min / 2


def add_part(running: RunningSoftmax, q: Tensor, k: Tensor, v: Tensor, scope: Scope) -> None:
    """Let the queries see one part of the keys."""
    for task in _tasks(q.shape[0], scope):
        q_task, k_task, v_task = _heads_first(q[:, task.queries], k[:, task.keys], v[:, task.keys])
        rule = _rule(task, scope, q)
        kernel = _kernel(q_task, v_task, rule, scope)
        out_BHSV, lse_BHS = kernel.forward(q_task, k_task, v_task, rule)
        running.merge(task.queries, out_BHSV.transpose(1, 2), lse_BHS)


class QuerySide(NamedTuple):
    """What a backward needs of the queries: their merged (out, lse) and the gradient of out."""

    q_BSHK: Tensor
    out_BSHV: Tensor
    lse_BHS: Tensor
    grad_BSHV: Tensor


def part_backward(side: QuerySide, k: Tensor, v: Tensor, scope: Scope, dq: Tensor) -> tuple[Tensor, Tensor]:
    """Adds to dq what one part of the keys gives, and returns its dk and dv; all in fp32 or better."""
    dk, dv = (torch.zeros_like(x, dtype=dq.dtype) for x in (k, v))
    for task in _tasks(k.shape[0], scope):
        k_task, v_task = _heads_first(k[:, task.keys], v[:, task.keys])
        q_task, out_task, grad_task = _heads_first(
            *(x[:, task.queries] for x in (side.q_BSHK, side.out_BSHV, side.grad_BSHV))
        )
        rule = _rule(task, scope, side.q_BSHK)
        kernel = _kernel(q_task, v_task, rule, scope)
        lse_task = side.lse_BHS[:, :, task.queries].contiguous()
        grads = kernel.backward(grad_task, q_task, k_task, v_task, out_task, lse_task, rule)
        for total, rows, part in zip((dq, dk, dv), (task.queries, task.keys, task.keys), grads, strict=True):
            total[:, rows] += part.transpose(1, 2)
    return dk, dv


def _kernel(q: Tensor, v: Tensor, rule: Rule, scope: Scope) -> Kernel:
    return choose_kernel(q, v, has_bias=rule.bias_B1ST is not None, simulated=scope.simulated)


def _heads_first(*tensors_BSHK: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in tensors_BSHK]


def _tasks(batch: int, scope: Scope) -> tuple[Task, ...]:
    return plan_tasks(
        scope.queries.chunks,
        scope.keys.chunks,
        window=scope.window,
        has_documents=scope.queries.documents_BS is not None,
        tiling=TILING._replace(max_elements=TILING.max_elements // batch),
    )


def _rule(task: Task, scope: Scope, like: Tensor) -> Rule:
    if task.cover is not Cover.MASKED:
        return Rule(scope.scale, causal=task.cover is Cover.CAUSAL)
    seen_BST = visible(scope, task.queries, task.keys, like.device)
    bias_BST = like.new_zeros((like.shape[0], *seen_BST.shape[1:])).masked_fill_(
        ~seen_BST, unseen(like.dtype)
    )
    return Rule(scope.scale, bias_B1ST=bias_BST.unsqueeze(1))


def visible(scope: Scope, queries: slice, keys: slice, device: torch.device) -> Tensor:
    """seen_BST (B is 1 without documents): whether a row of the queries sees a row of the keys."""
    s_S1 = _true_positions(scope.queries.chunks, device)[queries].unsqueeze(1)
    t_1T = _true_positions(scope.keys.chunks, device)[keys].unsqueeze(0)
    seen_BST = (t_1T <= s_S1).unsqueeze(0)
    if scope.window is not None:
        seen_BST = seen_BST & (s_S1 - t_1T < scope.window)
    query_documents, key_documents = scope.queries.documents_BS, scope.keys.documents_BS
    if query_documents is not None and key_documents is not None:
        same_BST = query_documents[:, queries].unsqueeze(2) == key_documents[:, keys].unsqueeze(1)
        seen_BST = seen_BST & same_BST
    return seen_BST


def _true_positions(chunks: tuple[Chunk, ...], device: torch.device) -> Tensor:
    return torch.cat([torch.arange(chunk.start, chunk.end, device=device) for chunk in chunks])


def plain_attention(q_BSHK: Tensor, k_BTGK: Tensor, v_BTGV: Tensor, scope: Scope) -> Tensor:
    """The definition, with all S x T scores in memory and autograd's own backward: what the rest equals."""
    groups = k_BTGK.shape[2]
    seen_BST = visible(scope, slice(None), slice(None), q_BSHK.device)
    q_BSGRK = q_BSHK.unflatten(2, (groups, -1))
    scores_BGRST = torch.einsum("bsgrk,btgk->bgrst", q_BSGRK, k_BTGK) * scope.scale
    scores_BGRST = scores_BGRST.masked_fill(~seen_BST[:, None, None], float("-inf"))
    weights_BGRST = torch.softmax(scores_BGRST, dim=-1)
    return torch.einsum("bgrst,btgv->bsgrv", weights_BGRST, v_BTGV).flatten(2, 3)
