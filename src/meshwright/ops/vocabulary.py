"""Embedding look-up where tp shards the vocabulary (vocab parallel).

Rank r of n holds rows r V/n ... (r+1) V/n of the table. The table is never gathered: each rank looks up its
own ids, and the sum over ranks is the result.
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional


def vocab_parallel_lookup(ids_BS: Tensor, table_VD: Tensor, group: ProcessGroup) -> Tensor:
    """x{n}[B, S, D]: embeddings of this rank's ids and zeros for the others; to be summed over ranks."""
    local_BS, is_mine_BS = _to_local(ids_BS, table_VD.shape[0], group)
    return functional.embedding(local_BS, table_VD) * is_mine_BS[..., None]


def _to_local(ids_BS: Tensor, num_rows: int, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    shifted = ids_BS - group.rank() * num_rows
    is_mine = (shifted >= 0) & (shifted < num_rows)
    return torch.where(is_mine, shifted, 0), is_mine
