"""cp by heads (Ulysses): all-to-all from rows to heads, attention over the full sequence, all-to-all back.

    q[B, S_cp, H, K] -> q[B, S, H_cp, K]   all-to-all over cp, with k and v in the same message
    out[B, S, H_cp, V] = attend(q, k, v)   the ordinary attention of one device, any mask
    out[B, S, H_cp, V] -> out[B, S_cp, H, V]   all-to-all over cp

`hierarchical` does this among cp_inner neighbouring ranks, whose rows together are the zig-zag layout
of cp / cp_inner ranks, with ring attention (ring.py) across those groups.

Per layer and rank, e bytes per element, n ranks that exchange heads, one microbatch:
    forward   2 all-to-all   (n - 1) / n  B S_cp (H K + G K + G V + H V) e   bytes sent
    backward  2 all-to-all   the same
    hierarchical adds the ring of its cp / n ranks over n S_cp rows of G / n heads

It pays inside an NVLink domain: bytes shrink with cp, the kernel sees full sequences, packed documents
cost nothing extra. n must divide both the query and the key heads (of a tp rank).
"""

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from meshwright.errors import MeshError
from meshwright.ops.collectives import all_to_all
from meshwright.ops.documents import Documents
from meshwright.parallel.cp.zigzag import rank_order, unshard_sequence


class UlyssesAttend(nn.Module):
    """Takes the place of a block's `attend` and runs `attend` on fewer heads of more rows."""

    def __init__(self, group: ProcessGroup, attend: nn.Module) -> None:
        super().__init__()
        self.group = group
        self.full_attend = attend

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
        del positions_BS  # the rows are put in sequence order, which is all that attention needs
        self._check_heads(q_BSHK, k_BSGK)
        out_BSHV = self.full_attend(
            *self._rows_for_heads(q_BSHK, k_BSGK, v_BSGV),
            documents=documents,
            positions_BS=None,
            window=window,
            scale=scale,
        )
        # out[B, S, H_cp, V] -> out[B, S_cp, H, V]  all-to-all over cp
        return all_to_all(rank_order(out_BSHV, 1, self.group.size()), 1, 2, self.group)

    def _rows_for_heads(self, *heads_BSHK: Tensor) -> list[Tensor]:
        size = self.group.size()
        by_rank = [x.flatten(2).unflatten(2, (size, -1)) for x in heads_BSHK]
        # x[B, S_cp, n, X] -> x[B, S, 1, X]  all-to-all over cp; X holds one rank's heads of q, k and v
        packed = all_to_all(torch.cat(by_rank, dim=-1), 2, 1, self.group).squeeze(2)
        parts = unshard_sequence(packed, 1, size).split([x.shape[-1] for x in by_rank], dim=-1)
        return [part.unflatten(-1, (-1, x.shape[-1])) for part, x in zip(parts, heads_BSHK, strict=True)]

    def _check_heads(self, q_BSHK: Tensor, k_BSGK: Tensor) -> None:
        size, heads, groups = self.group.size(), q_BSHK.shape[2], k_BSGK.shape[2]
        if heads % size or groups % size:
            raise MeshError(
                f"{size} ranks cannot share {heads} query heads and {groups} key heads evenly",
                where="parallel.cp_kind",
                hint="use ring or gather, or hierarchical with a smaller cp_inner",
            )
