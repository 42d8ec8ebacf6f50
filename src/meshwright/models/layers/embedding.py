"""Embeddings of tokens and, for models that learn them, of positions."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.models.layers.adapter import Adapter
from meshwright.models.layers.token_rows import TokenRows
from meshwright.ops.sharded import local
from meshwright.spec import ModelSpec


class Lookup(nn.Module):
    """Rows of a table by id; replaced where tp shards the vocabulary."""

    def forward(self, ids_BS: Tensor, table_VD: Tensor) -> Tensor:
        """The embeddings x_BSD of the ids."""
        return functional.embedding(ids_BS, table_VD)

    def own_ids(self, ids_BS: Tensor) -> Tensor:
        """The ids whose embeddings this rank has after the look-up."""
        return ids_BS


class Table(nn.Module):
    """An embedding table: one vector per id."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, width))
        self.lookup = Lookup()
        # Set where the table is frozen: a low-rank update of it, and rows of single tokens.
        self.adapter: Adapter | None = None
        self.token_rows: TokenRows | None = None

    def forward(self, ids_BS: Tensor) -> Tensor:
        """The embeddings x_BSD of the ids."""
        x_BSD = self.lookup(ids_BS, local(self.weight))
        if self.adapter is not None:
            rows_BSR = self.lookup(ids_BS, local(self.adapter.lora_B))
            x_BSD = x_BSD + rows_BSR @ (self.adapter.scale * local(self.adapter.lora_A))
        if self.token_rows is not None:
            x_BSD = x_BSD + self.token_rows(self.lookup.own_ids(ids_BS))
        return x_BSD


class Embedding(nn.Module):
    """Token table, plus a position table for models with learned positions."""

    def __init__(self, spec: ModelSpec, *, has_positions: bool) -> None:
        super().__init__()
        self.tokens = Table(spec.vocab_size, spec.width)
        self.positions = Table(spec.max_positions, spec.width) if has_positions else None
        self.dropout = nn.Dropout(spec.dropout)

    def forward(self, tokens_BS: Tensor, positions_BS: Tensor) -> Tensor:
        """The embeddings x_BSD of tokens and positions."""
        x_BSD = self.tokens(tokens_BS)
        if self.positions is not None:
            x_BSD = x_BSD + self.positions(positions_BS)
        return self.dropout(x_BSD)
