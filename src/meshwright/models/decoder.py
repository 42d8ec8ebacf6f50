"""The decoder: embedding, blocks, norm, head. A pipeline stage is the same class with fewer blocks."""

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional

from meshwright.models.layers.adapter import Adapter
from meshwright.models.layers.attention import Attention
from meshwright.models.layers.embedding import Embedding, Table
from meshwright.models.layers.latent import LatentAttention
from meshwright.models.layers.mlp import build_mlp
from meshwright.models.layers.moe import Moe
from meshwright.models.layers.norm import build_norm
from meshwright.models.layers.rope import RopeTables, rope_tables
from meshwright.models.layers.token_rows import TokenRows
from meshwright.ops.cast import accumulation_dtype
from meshwright.ops.documents import Documents, host_number
from meshwright.ops.dropout_keys import mixed
from meshwright.ops.loss import UpdatedHead, linear_cross_entropy
from meshwright.ops.loss_rows import RowKernels
from meshwright.ops.pair_loss import PairInputs, PairSettings, linear_pair_loss
from meshwright.ops.sharded import local
from meshwright.spec import AdapterSpec, ModelSpec


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); `mlp` is dense or routed."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        self.is_routed = spec.is_moe_layer(layer)
        self.attention_norm = build_norm(spec)
        self.attention = LatentAttention(spec) if spec.attention.latent else Attention(spec)
        self.mlp_norm = build_norm(spec)
        self.mlp = (
            Moe(spec.moe, spec.width) if spec.moe and self.is_routed else build_mlp(spec.mlp, spec.width)
        )
        self.dropout = nn.Dropout(spec.dropout)

    def forward(
        self,
        x_BSD: Tensor,
        *,
        rope: RopeTables | None,
        positions_BS: Tensor,
        documents: Documents | None,
        sequence_weights_B: Tensor | None,
        dropout_keys_BS: Tensor | None = None,
    ) -> Tensor:
        """x_BSD after this block; the keys are those of this layer."""
        attended_BSD = self.attention(
            self.attention_norm(x_BSD),
            rope=rope,
            positions_BS=positions_BS,
            documents=documents,
            dropout_keys_BS=dropout_keys_BS,
        )
        x_BSD = x_BSD + self.dropout(attended_BSD)
        routed = {"sequence_weights_B": sequence_weights_B} if self.is_routed else {}
        return x_BSD + self.dropout(self.mlp(self.mlp_norm(x_BSD), dropout_keys_BS=dropout_keys_BS, **routed))


class Head(nn.Module):
    """Logits, or the loss without storing them all; has no weight when tied to the embedding."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.weight = None if spec.tied_head else nn.Parameter(torch.empty(spec.vocab_size, spec.width))
        # Set where the weight is frozen: a low-rank update of it, and rows of single tokens. A tied head has
        # its rows from the embedding.
        self.adapter: Adapter | None = None
        self.token_rows: TokenRows | None = None
        # Set where tp shards the vocabulary.
        self.vocabulary_group: ProcessGroup | None = None
        # Set in a rehearsal; None: the kernels of the device that the logits are on.
        self.loss_kernels: RowKernels | None = None
        # Set where a run trains on preference pairs.
        self.pair_settings: PairSettings | None = None
        # Figures of the pairs since they were last read, and sums of log-probs where they are recorded.
        self.pair_figures: Tensor | None = None
        self.recorded_sums: list[Tensor] | None = None
        # Whether an evaluation adds to the figures; inside a training run it does not.
        self.records_evaluation = False

    def forward(
        self,
        x_BSD: Tensor,
        tied: Table | None = None,
        targets_BS: Tensor | None = None,
        weights_BS: Tensor | None = None,
        num_targets: int | None = None,
        pairs: PairInputs | None = None,
        dropout_keys_BS: Tensor | None = None,
    ) -> Tensor:
        """logits_BSV, or with targets the sum of weight x cross-entropy over all tokens, or of all pairs."""
        weight_VD = self._updated_weight(x_BSD, tied, dropout_keys_BS)
        if targets_BS is None:
            return _logits(x_BSD, weight_VD)
        if pairs is not None:
            return self._pair_loss(x_BSD, weight_VD, targets_BS, pairs, num_targets)
        if weights_BS is None:
            weights_BS = torch.ones_like(targets_BS, dtype=torch.float32)
        return linear_cross_entropy(
            x_BSD,
            weight_VD,
            targets_BS,
            weights_BS,
            group=self.vocabulary_group,
            kernels=self.loss_kernels,
            num_counted=num_targets,
        )

    def _updated_weight(
        self, x_BSD: Tensor, tied: Table | None, dropout_keys_BS: Tensor | None
    ) -> Tensor | UpdatedHead:
        """This rank's rows of the weight, with its updates where the weight is frozen."""
        weight = self.weight if tied is None else tied.weight
        assert weight is not None
        weight_VD, rows = local(weight), self.token_rows if tied is None else tied.token_rows
        factors: list[tuple[Tensor, Tensor]] = []
        if self.adapter is not None:
            factors.append(self.adapter.factors(x_BSD, dropout_keys_BS))
        if rows is not None:
            rank = 0 if self.vocabulary_group is None else self.vocabulary_group.rank()
            factors.append(rows.factors(x_BSD, rank * len(weight_VD), len(weight_VD)))
        if not factors:
            return weight_VD
        us, bs = zip(*factors, strict=True)
        return UpdatedHead(weight_VD, torch.cat(us, -1), torch.cat(bs, -1))

    def _pair_loss(
        self,
        x_BSD: Tensor,
        weight_VD: Tensor | UpdatedHead,
        targets_BS: Tensor,
        pairs: PairInputs,
        num_targets: int | None,
    ) -> Tensor:
        assert self.pair_settings is not None
        found = linear_pair_loss(
            x_BSD,
            weight_VD,
            targets_BS,
            pairs,
            self.pair_settings,
            group=self.vocabulary_group,
            kernels=self.loss_kernels,
            num_counted=num_targets,
        )
        if self.recorded_sums is not None:
            self.recorded_sums.append(found.sums_BA)
        elif self.training or self.records_evaluation:
            before = self.pair_figures
            self.pair_figures = found.figures_3 if before is None else before + found.figures_3
        return found.loss


def _logits(x_BSD: Tensor, weight_VD: Tensor | UpdatedHead) -> Tensor:
    if isinstance(weight_VD, UpdatedHead):
        return functional.linear(x_BSD, weight_VD.weight_VD) + functional.linear(*weight_VD[1:])
    return functional.linear(x_BSD, weight_VD)


class Decoder(nn.Module):
    """A decoder-only transformer, or the part of one that a pipeline stage holds.

    Blocks are keyed by their number in the full model, so parameter names are the same in any
    stage. A last stage whose head is tied, and which has no embedding to tie it to, holds its own
    `embedding.tokens.weight`: same name, same initial value, gradients to be summed with the first.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        layers: range | None = None,
        has_embedding: bool = True,
        has_head: bool = True,
    ) -> None:
        super().__init__()
        self.spec = spec
        # Set where adapters are attached.
        self.adapter: AdapterSpec | None = None
        self.has_embedding = has_embedding
        needs_table = has_embedding or (has_head and spec.tied_head)
        has_positions = has_embedding and spec.positions == "learned"
        self.embedding = Embedding(spec, has_positions=has_positions) if needs_table else None
        layers = range(spec.num_layers) if layers is None else layers
        self.blocks = nn.ModuleDict({str(layer): Block(spec, layer) for layer in layers})
        self.norm = build_norm(spec) if has_head else None
        self.head = Head(spec) if has_head else None

    def forward(  # noqa: PLR0913  a pipeline schedule passes tensors one by one
        self,
        x: Tensor,
        *,
        positions_BS: Tensor,
        document_offsets_P: Tensor | None = None,
        longest_document: int | None = None,
        targets_BS: Tensor | None = None,
        weights_BS: Tensor | None = None,
        num_targets: int | None = None,
        sequence_weights_B: Tensor | None = None,
        answers_BS: Tensor | None = None,
        pairs_BPF: Tensor | None = None,
        dropout_keys_BS: Tensor | None = None,
    ) -> Tensor:
        """x_BSD without a head, logits_BSV without targets, else the scalar sum of weighted losses.

        `x` is tokens_BS in the first stage and x_BSD in the others. `positions_BS` restart in each
        document; `document_offsets_P` are the offsets of separate documents (None: one per row), and
        `longest_document` counts the tokens of the longest one, or more.
        `weights_BS` hold mask and denominator of the loss (None: a plain sum over all targets); at most
        `num_targets` of them are not 0 (None: any number). `sequence_weights_B` hold those of the MoE
        load-balancing loss (None: it is left out). `answers_BS` and `pairs_BPF` are those of `Microbatch`:
        with them the result is the loss of preference pairs. Training with dropout in adapters needs
        `dropout_keys_BS`.
        """
        x_BSD = self.embedding(x, positions_BS) if self.has_embedding and self.embedding else x
        rope = self._rope_tables(x_BSD, positions_BS)
        documents = None
        if document_offsets_P is not None and longest_document is not None:
            documents = Documents(document_offsets_P, host_number(longest_document))
        for layer, block in self.blocks.items():
            x_BSD = block(
                x_BSD,
                rope=rope,
                positions_BS=positions_BS,
                documents=documents,
                sequence_weights_B=sequence_weights_B,
                dropout_keys_BS=None if dropout_keys_BS is None else mixed(dropout_keys_BS, int(layer)),
            )
        if self.head is None:
            return x_BSD
        assert self.norm is not None
        tied = self.embedding.tokens if self.spec.tied_head and self.embedding else None
        pairs = None
        if answers_BS is not None and pairs_BPF is not None and weights_BS is not None:
            pairs = PairInputs(weights_BS, answers_BS, pairs_BPF)
        return self.head(self.norm(x_BSD), tied, targets_BS, weights_BS, num_targets, pairs, dropout_keys_BS)

    def _rope_tables(self, x_BSD: Tensor, positions_BS: Tensor) -> RopeTables | None:
        """The RoPE tables, computed once for all blocks."""
        attention = self.spec.attention
        if self.spec.rope is None:
            return None
        width = attention.latent.rope_width if attention.latent else attention.head_width
        return rope_tables(self.spec.rope, positions_BS, width=width, dtype=accumulation_dtype(x_BSD))


def build_decoder(
    spec: ModelSpec,
    *,
    layers: range | None = None,
    has_embedding: bool = True,
    has_head: bool = True,
    dtype: torch.dtype = torch.float32,
) -> Decoder:
    """The decoder on the meta device: shapes and names without memory. `initialise` fills it."""
    with torch.device("meta"):
        model = Decoder(spec, layers=layers, has_embedding=has_embedding, has_head=has_head)
    if dtype.itemsize >= torch.float32.itemsize:
        return model.to(dtype)
    for (
        parameter
    ) in model.parameters():  # buffers stay fp32: small updates of counters and biases would round to nothing
        parameter.data = parameter.data.to(dtype)
    return model
