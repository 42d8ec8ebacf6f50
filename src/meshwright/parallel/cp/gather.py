"""cp by all-gather: every rank gathers all keys and values, and computes its own queries.

    out[B, S_cp, H, V] = attend(q[B, S_cp, H, K], all_gather_cp(k[B, S_cp, G, K]), all_gather_cp(v))

Per layer and rank, e bytes per element, one microbatch:
    forward   1 all-gather       (cp - 1) / cp  B S G (K + V) e   bytes sent
    backward  1 reduce-scatter   (cp - 1) / cp  B S G (K + V) e
Saved for backward: the gathered keys and values, B S G (K + V) e.

Documents and windows are one kernel call for each of the rank's chunks, over the keys of its documents up to
the chunk's end; there are two, or two for each of `cp_stripes`. Every rank has the offsets of all documents,
so they are not communicated.

It pays when the keys are small compared to the queries (GQA) or the sequence is not very long: one large
collective, no limit from the number of heads. It is fully exposed, and its memory does not shrink with cp.
"""

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from meshwright.hardware.simulated_device import SimulatedDevice
from meshwright.ops.attention import AttentionScope, Rows, attend
from meshwright.ops.collectives import all_gather
from meshwright.ops.documents import Documents, chunk_segments, document_ids, one_document_each
from meshwright.ops.varlen_attention import attend_segments, has_varlen
from meshwright.parallel.cp.zigzag import all_chunks, chunks_of, shard_sequence, unshard_sequence


class GatherAttend(nn.Module):
    """Takes the place of a block's `attend`; q, k, v are this rank's rows in the zig-zag layout."""

    def __init__(
        self, group: ProcessGroup, simulated: SimulatedDevice | None = None, stripes: int = 1
    ) -> None:
        super().__init__()
        self.group, self.simulated, self.stripes = group, simulated, stripes

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
        keys = self._gather_keys(k_BSGK, v_BSGV)
        length = keys[0].shape[1]
        window = None if window is not None and window >= length else window
        is_plain = documents is None and window is None
        if is_plain or not has_varlen(q_BSHK, v_BSGV, self.simulated):
            scope = self._scope(q_BSHK, documents, scale, window)
            return attend(q_BSHK, *keys, scope)
        documents = documents or one_document_each(len(q_BSHK), length, q_BSHK.device)
        chunks = chunks_of(self.group.rank(), self.group.size(), q_BSHK.shape[1], self.stripes)
        segments = [chunk_segments(documents, len(q_BSHK), length, chunk) for chunk in chunks]
        parts = [
            attend_segments(q_part, *keys, seen._replace(window=window), scale=scale)
            for q_part, seen in zip(q_BSHK.chunk(len(chunks), dim=1), segments, strict=True)
        ]
        return torch.cat(parts, dim=1)

    def _scope(
        self, q_BSHK: Tensor, documents: Documents | None, scale: float, window: int | None
    ) -> AttentionScope:
        cp, rank, (num_sequences, length) = self.group.size(), self.group.rank(), q_BSHK.shape[:2]
        ids_BT = None if documents is None else document_ids(documents, num_sequences, cp * length)
        ids_BS = None if ids_BT is None else shard_sequence(ids_BT, 1, rank, cp, self.stripes)
        queries = Rows(chunks_of(rank, cp, length, self.stripes), ids_BS)
        keys = Rows(all_chunks(cp, length, self.stripes), ids_BT)
        return AttentionScope(queries, keys, scale, window, self.simulated)

    def _gather_keys(self, k_BSGK: Tensor, v_BSGV: Tensor) -> tuple[Tensor, Tensor]:
        groups, key_width = k_BSGK.shape[2:]
        packed_BSX = torch.cat([k_BSGK.flatten(2), v_BSGV.flatten(2)], dim=-1)
        # x[B, S_cp, G (K + V)] -> x[B, S, G (K + V)]  all-gather over cp; backward reduce-scatter
        gathered_BTX = all_gather(packed_BSX, 1, self.group)
        packed_BTX = unshard_sequence(gathered_BTX, 1, self.group.size(), self.stripes)
        k_BTX, v_BTX = packed_BTX.split([groups * key_width, groups * v_BSGV.shape[3]], dim=-1)
        return k_BTX.unflatten(-1, (groups, -1)), v_BTX.unflatten(-1, (groups, -1))
