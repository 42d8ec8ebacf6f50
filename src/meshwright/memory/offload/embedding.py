"""A frozen token table in host memory: the device reads the rows of a micro-batch from there.

    x[B, S, D] = table[tokens[B, S]]        B S D elements over the host link, and no copy of the table

The rows of 4,096 tokens of Llama-3.1-8B are 34 MB where the table has 1 GB.
"""

from torch import Tensor

from meshwright.memory.offload.host import HostLink
from meshwright.models.decoder import Decoder
from meshwright.models.layers.embedding import Lookup
from meshwright.ops.host_rows import host_rows


class HostLookup(Lookup):
    """Replaces `Lookup` where the table is in host memory."""

    def forward(self, ids_BS: Tensor, table_VD: Tensor) -> Tensor:
        """The embeddings x_BSD of the ids, on the device of the ids. A frozen table gets no gradient."""
        if table_VD.requires_grad:  # B of an adapter, which is on the device
            return super().forward(ids_BS, table_VD)
        return host_rows(table_VD.detach(), ids_BS)


def move_embedding(model: Decoder, link: HostLink) -> None:
    """Move the token table of a stage, where it has one, to host memory."""
    if model.embedding is None:
        return
    tokens = model.embedding.tokens
    table_VD = link.pool.take(tokens.weight.nbytes).view_as(tokens.weight)
    table_VD.copy_(tokens.weight.detach())
    tokens.weight.data = table_VD
    tokens.lookup = HostLookup()
