"""Expert parallel: routed experts are distributed over ranks that otherwise hold other tokens.

    x[N, D]  rows sorted by expert  ->  rows to the rank that has the expert      all-to-all (dispatch)
    w[N]     their weights, and with dropout the keys of their masks              all-to-all
    y[N, D] = w experts(x)  on the rank that has them
    y[N, D]  back to the rank that sent the row                                   all-to-all (combine)

ep borrows its ranks from dp_shard x cp, so it adds none: dp_shard=4 with ep=2 is four ranks, each holding
half of the experts. Two all-to-alls forward and two backward per routed layer, of top_k x T x D elements
each way under even routing. The gradient of an expert already holds the tokens of all ep ranks; it is
all-reduced over the other data ranks only.

With etp = tp each expert is sharded over tp as well: tokens are all-gathered over tp first and the partial
results reduce-scattered after. With etp = 1 each tp rank sends its own part of the sequence.

With `ep_overlap` the exchanges are launched asynchronously; see ep_overlap.py.

It pays when the experts do not fit, or when gathering them under ZeRO-3 costs more than sending tokens.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from meshwright.mesh import Mesh
from meshwright.models.layers.adapter import ExpertAdapter
from meshwright.models.layers.moe import Compute, Dispatch, Moe, RowInputs, Shared
from meshwright.ops.collectives import all_gather, all_gather_single, all_to_all_rows, reduce_scatter
from meshwright.ops.expert_rows import ExpertRows, rows_of_tokens, sum_of_rows
from meshwright.ops.routed_rows import RowCounts
from meshwright.parallel.cp.zigzag import shard_sequence, unshard_sequence
from meshwright.parallel.ep_overlap import HalvesDispatch, SharedOverlapDispatch, received_rows


class ExchangeDispatch(nn.Module):
    """Runs the experts on the ranks that have them; the inner dispatch sorts rows and applies weights."""

    def __init__(self, inner: Dispatch, group: ProcessGroup, row_counts: RowCounts) -> None:
        super().__init__()
        self.inner, self.group, self.row_counts = inner, group, row_counts

    def forward(
        self, x_TD: Tensor, experts_TC: Tensor, inputs_TC: RowInputs, compute: Compute, shared: Shared
    ) -> tuple[Tensor, Tensor | None]:
        """The same result as the inner dispatch. Communicates over ep."""
        return self.inner(x_TD, experts_TC, inputs_TC, partial(self._on_expert_ranks, compute), shared)

    def _on_expert_ranks(
        self, compute: Compute, x_TD: Tensor, rows: ExpertRows, inputs_N: RowInputs, counts_E: Tensor
    ) -> Tensor:
        """Send rows sorted by expert to the experts' ranks, run the experts, and send the rows back."""
        sent_RE = counts_E.view(self.group.size(), -1)
        received_RE = torch.empty_like(sent_RE)
        dist.all_to_all_single(received_RE, sent_RE.contiguous(), group=self.group)
        # Host sync: the sizes of the exchange must be known before it.
        sent, received = self.row_counts.exchanged(sent_RE, received_RE, len(rows.choice_N))
        x_ND = all_to_all_rows(rows_of_tokens(x_TD, rows), sent, received, self.group)
        inputs_N1 = inputs_N.each(lambda x_N: all_to_all_rows(x_N[:, None], sent, received, self.group))
        here = received_rows(received_RE, sum(received))
        y_ND = compute(x_ND, here, inputs_N1.each(here.choices), received_RE.sum(0))
        # One choice for each received row, so the sum is the inverse permutation.
        return all_to_all_rows(sum_of_rows(y_ND, here), received, sent, self.group)


class GatherDispatch(nn.Module):
    """etp: all-gathers the tokens of the tp ranks, each of which holds a shard of every expert."""

    def __init__(self, inner: nn.Module, group: ProcessGroup) -> None:
        super().__init__()
        self.inner, self.group = inner, group

    def forward(
        self, x_TD: Tensor, experts_TC: Tensor, inputs_TC: RowInputs, compute: Compute, shared: Shared
    ) -> tuple[Tensor, Tensor | None]:
        """The inner dispatch between x[T_tp, D] -> x[T, D] and y{tp}[T, D] -> y[T_tp, D]."""
        keys_TC = inputs_TC.dropout_keys
        y_TD, shared_BSD = self.inner(
            all_gather(x_TD, 0, self.group),
            all_gather_no_grad(experts_TC, 0, self.group),
            RowInputs(
                all_gather(inputs_TC.weights, 0, self.group),
                None if keys_TC is None else all_gather_no_grad(keys_TC, 0, self.group),
            ),
            compute,
            shared,
        )
        return reduce_scatter(y_TD, 0, self.group), shared_BSD


def all_gather_no_grad(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """The shards of all ranks concatenated along `dim`, without gradients."""
    shard = x.movedim(dim, 0).contiguous()
    full = shard.new_empty((group.size() * shard.shape[0], *shard.shape[1:]))
    all_gather_single(full, shard, group=group)
    return full.movedim(0, dim)


class SumCounts(nn.Module):
    """Counts of full sequences from the counts of their shards."""

    def __init__(self, groups: list[ProcessGroup]) -> None:
        super().__init__()
        self.groups = groups

    def forward(self, counts_BE: Tensor) -> Tensor:
        """The counts all-reduced over the axes that shard sequences."""
        total = counts_BE.clone()
        for group in self.groups:
            dist.all_reduce(total, group=group)
        return total


class ShardedCapacity(nn.Module):
    """Capacity of full sequences: tokens are kept or dropped in the order of the full sequence."""

    def __init__(self, inner: nn.Module, mesh: Mesh) -> None:
        super().__init__()
        self.inner = inner
        self.tp, self.cp, self.stripes = mesh.group("tp"), mesh.group("cp"), mesh.parallel.cp_stripes

    def forward(self, experts_BSC: Tensor) -> Tensor:
        """The inner capacity's decisions for this rank's tokens. Communicates over tp and cp."""
        over_cp = all_gather_no_grad(all_gather_no_grad(experts_BSC, 1, self.tp), 1, self.cp)
        kept_BSC = self.inner(unshard_sequence(over_cp, 1, self.cp.size(), self.stripes))
        local_BSC = shard_sequence(kept_BSC, 1, self.cp.rank(), self.cp.size(), self.stripes)
        return local_BSC.chunk(self.tp.size(), 1)[self.tp.rank()]


def reads_row_counts(layer: Moe) -> bool:
    """Whether the host reads row counts in the layer's forward: for an exchange or a capacity."""
    exchanges = any(isinstance(module, tuple(_EXCHANGES.values())) for module in layer.modules())
    return exchanges or layer.moe.capacity_factor is not None


_EXCHANGES = {"none": ExchangeDispatch, "shared": SharedOverlapDispatch, "halves": HalvesDispatch}


def apply_moe(model: nn.Module, mesh: Mesh) -> None:
    """Adapt every routed layer of a stage to ep, etp, and sequences sharded by tp and cp."""
    parallel = mesh.parallel
    sequence_groups = [mesh.group(axis) for axis in ("tp", "cp") if getattr(parallel, axis) > 1]
    for layer in [module for module in model.modules() if isinstance(module, Moe)]:
        if parallel.ep > 1:
            group = mesh.expert.get_group("ep")
            assert isinstance(layer.dispatch, Dispatch)
            layer.dispatch = _EXCHANGES[parallel.ep_overlap](layer.dispatch, group, layer.row_counts)
        if parallel.etp > 1:
            layer.dispatch = GatherDispatch(layer.dispatch, mesh.group("tp"))
            adapters = layer.experts.adapters
            down = adapters["down"] if adapters is not None and "down" in adapters else None
            if isinstance(down, ExpertAdapter):
                down.shard_input(mesh.group("tp"))
        layer.sequence_shard = mesh.coordinate("tp"), parallel.tp
        if sequence_groups:
            layer.balance.total = SumCounts(sequence_groups)
            if layer.capacity is not None:
                layer.capacity = ShardedCapacity(layer.capacity, mesh)
