"""cp by all-gather: every rank gathers all keys and values, and computes its own queries.

    out[B, S_cp, H, V] = attend(q[B, S_cp, H, K], all_gather_cp(k[B, S_cp, G, K]), all_gather_cp(v))

Per layer and rank, e bytes per element, one microbatch:
    forward   1 all-gather       (cp - 1) / cp  B S G (K + V) e   bytes sent
    backward  1 reduce-scatter   (cp - 1) / cp  B S G (K + V) e
    with documents, forward only, 1 all-gather of their numbers: (cp - 1) / cp  8 B S
Saved for backward: the gathered keys and values, B S G (K + V) e.

It pays when the keys are small compared to the queries (GQA) or the sequence is not very long: one large
collective, no limit from the number of heads. It is fully exposed, and its memory does not shrink with cp.
"""

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from meshwright.hardware.simulated_device import SimulatedDevice
from meshwright.ops.attention import AttentionScope, Rows, attend
from meshwright.ops.collectives import all_gather
from meshwright.parallel.cp.zigzag import all_chunks, chunks_of, unshard_sequence


class GatherAttend(nn.Module):
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
        documents_BS: Tensor | None,
        positions_BS: Tensor | None,
        window: int | None,
        scale: float,
    ) -> Tensor:
        """This rank's rows of the attention over the full sequence. Communicates over cp."""
        del positions_BS  # causality follows from the layout
        cp, rank, length = self.group.size(), self.group.rank(), q_BSHK.shape[1]
        k_BTGK, v_BTGV = self._gather_keys(k_BSGK, v_BSGV)
        queries = Rows(chunks_of(rank, cp, length), documents_BS)
        keys = Rows(all_chunks(cp, length), gather_rows(documents_BS, self.group))
        return attend(q_BSHK, k_BTGK, v_BTGV, AttentionScope(queries, keys, scale, window, self.simulated))

    def _gather_keys(self, k_BSGK: Tensor, v_BSGV: Tensor) -> tuple[Tensor, Tensor]:
        groups, key_width = k_BSGK.shape[2:]
        packed_BSX = torch.cat([k_BSGK.flatten(2), v_BSGV.flatten(2)], dim=-1)
        # x[B, S_cp, G (K + V)] -> x[B, S, G (K + V)]  all-gather over cp; backward reduce-scatter
        packed_BTX = unshard_sequence(all_gather(packed_BSX, 1, self.group), 1, self.group.size())
        k_BTX, v_BTX = packed_BTX.split([groups * key_width, groups * v_BSGV.shape[3]], dim=-1)
        return k_BTX.unflatten(-1, (groups, -1)), v_BTX.unflatten(-1, (groups, -1))


def gather_rows(rows_BS: Tensor | None, group: ProcessGroup) -> Tensor | None:
    """Per-token numbers of the full sequence in sequence order; None stays None. x[B, S_cp] -> x[B, S]."""
    return None if rows_BS is None else unshard_sequence(all_gather(rows_BS, 1, group), 1, group.size())
