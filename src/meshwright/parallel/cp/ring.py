"""cp by ring attention: keys and values pass from rank to rank, and each step adds its part of the softmax.

    out[B, S_cp, H, V] = merge over owners o of attend(q[B, S_cp, H, K], k_o[B, S_cp, G, K], v_o)

At step i rank r holds the keys of rank r - i, and their send to the next rank is in flight while it computes.
In the zig-zag layout each step is one kernel call without a mask: the causal triangle on the local keys, the
head half of an earlier owner's keys for all queries, or all keys of a later owner for the tail half of
the queries; the same work on every rank. Backward runs the ring again; gradients of the keys follow
one step behind, in fp32, and end at their owner.

Per layer and rank, e bytes per element, w = max(e, 4), one microbatch:
    forward   cp - 1 messages       (cp - 1) / cp  B S G (K + V) e        bytes sent
    backward  2 (cp - 1) messages   (cp - 1) / cp  B S G (K + V) (e + w)
Saved for backward: only this rank's own q, k, v, out.

With separate documents each of these calls skips pairs of other documents. Every rank has the offsets of all
documents, so they are not communicated.

It pays for very long sequences: compute per step grows with (S / cp)^2 and overlaps messages that grow
with S / cp; memory shrinks with cp; no limit from the number of heads.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from meshwright.hardware.simulated_device import SimulatedDevice
from meshwright.ops.attention import (
    AttentionScope,
    Rows,
    RunningSoftmax,
    SavedQueries,
    backward_part,
    forward_part,
)
from meshwright.ops.cast import cast
from meshwright.ops.documents import Documents, document_ids
from meshwright.ops.varlen_attention import has_varlen
from meshwright.parallel.cp.zigzag import chunks_of, shard_sequence


class RingAttend(nn.Module):
    """Takes the place of a block's `attend`; q, k, v are this rank's rows in the zig-zag layout."""

    def __init__(self, group: ProcessGroup, simulated: SimulatedDevice | None = None) -> None:
        super().__init__()
        self.group, self.simulated = group, simulated

    def forward(
        self,
        q_BSHK: Tensor,
        k_BSGK: Tensor,
        v_BSGV: Tensor,
        *,
        documents: Documents | None,
        positions_BS: Tensor | None,
        window: int | None,
        scale: float,
    ) -> Tensor:
        """This rank's rows of the attention over the full sequence. Communicates over cp."""
        del positions_BS  # causality follows from the layout
        cp, (num_sequences, local_length) = self.group.size(), q_BSHK.shape[:2]
        length = cp * local_length
        window = None if window is not None and window >= length else window
        ids_BS: Tensor | None = None
        if documents is not None and (window is not None or not has_varlen(q_BSHK, v_BSGV, self.simulated)):
            ids_BS, documents = document_ids(documents, num_sequences, length), None
        rows = tuple(
            Rows(
                chunks_of(rank, cp, local_length),
                None if ids_BS is None else shard_sequence(ids_BS, 1, rank, cp),
            )
            for rank in range(cp)
        )
        ring = _Ring(self.group, rows, scale, window, self.simulated, documents, length)
        return _RingAttention.apply(q_BSHK, k_BSGK, v_BSGV, ring)  # pyright: ignore[reportReturnType]


def passes_keys(block: nn.Module) -> bool:
    """Whether this block's attention is a ring: torch's compiler does not trace messages between ranks."""
    return any(isinstance(module, RingAttend) for module in block.modules())


class _Ring(NamedTuple):
    """The ranks, the rows that each of them holds, and the attention mask between them."""

    group: ProcessGroup
    rows_by_rank: tuple[Rows, ...]
    scale: float
    window: int | None
    simulated: SimulatedDevice | None
    documents: Documents | None
    """Set where segments take the place of a mask."""
    sequence_length: int

    def scope(self, owner: int) -> AttentionScope:
        mine = self.rows_by_rank[self.group.rank()]
        return AttentionScope(
            mine,
            self.rows_by_rank[owner],
            self.scale,
            self.window,
            self.simulated,
            self.documents,
            self.sequence_length,
        )

    def owner_at(self, step: int) -> int:
        return (self.group.rank() - step) % self.group.size()


class _Message:
    """A send to the next rank and a receive from the previous one, both in flight."""

    def __init__(self, sent: Tensor, group: ProcessGroup) -> None:
        rank, size = group.rank(), group.size()
        # Referenced until `receive`: the send still reads it.
        self._sent, self._received = sent, torch.empty_like(sent)
        following = dist.get_global_rank(group, (rank + 1) % size)
        previous = dist.get_global_rank(group, (rank - 1) % size)
        operations = [
            dist.P2POp(dist.isend, sent, following, group),
            dist.P2POp(dist.irecv, self._received, previous, group),
        ]
        self._works = dist.batch_isend_irecv(operations)

    def receive(self) -> Tensor:
        for work in self._works:
            work.wait()
        return self._received


def _pack(k: Tensor, v: Tensor) -> Tensor:
    """Keys and values as one contiguous message."""
    return torch.cat([k.reshape(-1), v.reshape(-1)])


def _unpack(message: Tensor, k_like: Tensor, v_like: Tensor) -> tuple[Tensor, Tensor]:
    k, v = message.split([k_like.numel(), v_like.numel()])
    return k.view(k_like.shape), v.view(v_like.shape)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: _Ring) -> Tensor:
        running = RunningSoftmax(q, v.shape[-1])
        received = _pack(k, v)
        last = ring.group.size() - 1
        for step in range(last + 1):
            message = _Message(received, ring.group) if step < last else None
            forward_part(running, q, *_unpack(received, k, v), ring.scope(ring.owner_at(step)))
            received = message.receive() if message else received
        out = cast(running.out_BSHV, q.dtype)
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, out, running.lse_BHS)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, out, lse = ctx.saved_tensors
        ring: _Ring = ctx.ring
        last = ring.group.size() - 1
        side, dq = SavedQueries(q, out, lse, grad), torch.zeros_like(q, dtype=lse.dtype)
        message = _Message(_pack(k, v), ring.group) if last else None
        local = _pack(*backward_part(side, k, v, ring.scope(ring.owner_at(0)), dq))
        key_gradients: Tensor | None = None  # of the keys at hand, from the ranks they have passed
        for step in range(1, last + 1):
            assert message is not None
            received = message.receive()
            message = _Message(received, ring.group) if step < last else None
            in_flight = _Message(key_gradients, ring.group) if key_gradients is not None else None
            scope = ring.scope(ring.owner_at(step))
            key_gradients = _pack(*backward_part(side, *_unpack(received, k, v), scope, dq))
            if in_flight is not None:
                key_gradients += in_flight.receive()
        if key_gradients is not None:
            local += _Message(key_gradients, ring.group).receive()
        dk, dv = _unpack(local, k, v)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None
