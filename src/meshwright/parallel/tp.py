"""Tensor parallel with sequence parallel.

    attention   x[B, S_tp, D] -> x[B, S, D]             all-gather
                q, k, v[B, S, H_tp, K] = x[B, S, D] W[D, H_tp K]
                y{tp}[B, S, D] = o[B, S, H_tp K] W[H_tp K, D]
                y{tp}[B, S, D] -> y[B, S_tp, D]         reduce-scatter
    mlp         the same with F in the place of heads
    embedding   x{tp}[B, S, D] = rows of table[V_tp, D]; reduce-scatter
    head        logits[B, S, V_tp] = x[B, S, D] W[D, V_tp] after an all-gather; the loss never gathers them

With `memory.regather_tp_inputs` a pair saves x[B, S_tp, D] and all-gathers x[B, S, D] again in backward.

Per block forward: two all-gathers and two reduce-scatters of B S D elements, as many backward (an
all-gather's backward is a reduce-scatter). Parameters that tp does not shard (norms, biases after a row-wise
matmul, routers) see a part of the sequence or of the heads on each rank: their gradients are partial and are
all-reduced over tp.

It pays inside an NVLink domain, when layers are too wide for one device or a micro-batch of one sequence
is too large; it costs four exposed collectives a block.
"""

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from meshwright.mesh import Mesh
from meshwright.models.decoder import Decoder
from meshwright.models.layers.adapter import Adapter
from meshwright.models.layers.embedding import Embedding, Lookup
from meshwright.models.layers.linear import Linear
from meshwright.models.layers.moe import Moe
from meshwright.ops.collectives import all_gather, reduce_scatter
from meshwright.ops.gathered_linear import GatheredLinears, GatheredMatmul
from meshwright.ops.vocabulary import vocab_parallel_lookup
from meshwright.spec.placement import tp_boundary

SEQUENCE_DIM = 1


class ReduceScatterOutput(nn.Module):
    """The output of a row-wise matmul: y{tp}[B, S, D] -> y[B, S_tp, D]."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__()
        self.group = group

    def forward(self, y_BSD: Tensor) -> Tensor:
        """This rank's part of the sequence, summed over tp."""
        return reduce_scatter(y_BSD, SEQUENCE_DIM, self.group)


class VocabularyParallelLookup(Lookup):
    """The look-up in an embedding sharded over the vocabulary; its result is sharded over the sequence."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__()
        self.group = group

    def forward(self, ids_BS: Tensor, table_VD: Tensor) -> Tensor:
        """The embeddings x[B, S_tp, D] of this rank's part of the sequence."""
        return reduce_scatter(vocab_parallel_lookup(ids_BS, table_VD, self.group), SEQUENCE_DIM, self.group)

    def own_ids(self, ids_BS: Tensor) -> Tensor:
        """The ids of this rank's part of the sequence."""
        return ids_BS.chunk(self.group.size(), SEQUENCE_DIM)[self.group.rank()]


def apply_tp(model: Decoder, mesh: Mesh, *, regather: bool = False) -> None:
    """Add the collectives of the tp boundaries to a stage whose parameters are already sharded.

    With `regather` blocks free their gathered inputs after forward. The head saves its own: backward begins
    there.
    """
    group = mesh.group("tp")
    routed = {name for name, module in model.named_modules() if isinstance(module, Moe)}
    for name, module in model.named_modules():
        kind = tp_boundary(name, is_routed=name in routed)
        if kind == "gather" and regather and module is not model.head:
            _regather_input(module, group)
        elif kind == "gather":
            _gather_input(module, group)
        elif kind == "scatter" and isinstance(module, Linear):
            module.reduce_output = ReduceScatterOutput(group)
            if module.adapter is not None:
                module.adapter.shard_input(group)
    if isinstance(model.embedding, Embedding):
        _shard_embedding(model.embedding, group)
    if model.head is not None:
        model.head.vocabulary_group = group


def _gather_input(module: nn.Module, group: ProcessGroup) -> None:
    def gather(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (all_gather(inputs[0], SEQUENCE_DIM, group), *inputs[1:])

    module.register_forward_pre_hook(gather)


def _regather_input(module: nn.Module, group: ProcessGroup) -> None:
    linears = GatheredLinears(SEQUENCE_DIM, group)

    def enter(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (linears.enter(inputs[0]), *inputs[1:])

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(lambda *_: linears.leave())
    for layer in module.modules():
        if isinstance(layer, Linear | Adapter):
            layer.matmul = GatheredMatmul(linears)


def _shard_embedding(embedding: Embedding, group: ProcessGroup) -> None:
    embedding.tokens.lookup = VocabularyParallelLookup(group)
    if embedding.positions is not None:

        def local_positions(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return (inputs[0].chunk(group.size(), SEQUENCE_DIM)[group.rank()],)

        embedding.positions.register_forward_pre_hook(local_positions)
