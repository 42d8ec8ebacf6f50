"""Trained rows of single tokens (new or reserved ones) beside a frozen embedding or head.

    x[t]       = W[id] + change[n]                    where the token t has the n-th trained id
    logits[t]  = x W^T + (x change^T) onehot^T        onehot[V, N] is 1 where row v has the n-th trained id

The change starts at zero. It is replicated over tp, where each rank sees its part of the sequence, and in the
head its part of the vocabulary: its gradient is partial, as that of every replicated parameter.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.ops.cast import compute_dtype
from meshwright.ops.sharded import local


class TokenRows(nn.Module):
    """What is added to the rows of some tokens."""

    ids_N: Tensor

    def __init__(self, ids: Sequence[int], width: int) -> None:
        super().__init__()
        self.ids = tuple(sorted(ids))
        self.change = nn.Parameter(torch.empty(len(self.ids), width))
        self.register_buffer("ids_N", torch.empty(len(self.ids), dtype=torch.int64), persistent=False)

    def set_ids(self) -> None:
        """Fill the buffer of ids, after it got its memory."""
        self.ids_N.copy_(torch.tensor(self.ids))

    def forward(self, ids_BS: Tensor) -> Tensor:
        """What is added to the embeddings of these ids: zeros for ids that are not trained."""
        # tp and cp ranks have a part of each sequence, a view; torch warns of those.
        place_BS = torch.searchsorted(self.ids_N, ids_BS.contiguous()).clamp(max=len(self.ids) - 1)
        is_trained_BS = self.ids_N[place_BS] == ids_BS
        return functional.embedding(place_BS, local(self.change)) * is_trained_BS[..., None]

    def factors(self, x_BSD: Tensor, first_row: int, num_rows: int) -> tuple[Tensor, Tensor]:
        """(u_BSN, onehot_VN): what is added to the logits of these rows of the vocabulary is u onehot^T."""
        rows_V = torch.arange(first_row, first_row + num_rows, device=self.ids_N.device)
        onehot_VN = (rows_V[:, None] == self.ids_N).to(compute_dtype(x_BSD))
        return functional.linear(x_BSD, local(self.change)), onehot_VN
