"""Expert parallel with exchanges that overlap with compute, by `parallel.ep_overlap`.

    shared    launch dispatch | shared experts                      | wait, experts, combine
    halves    launch both dispatches | shared experts, then the experts of the first half | launch its combine
                                     | experts of the second half                         | launch its combine

`shared` overlaps one of a layer's two exchanges in each pass: the dispatch forward, and backward the exchange
of its gradients, which is launched after the experts' backward and waited for after that of the shared
experts. `halves` overlaps the dispatch of the second half with the experts of the first, and the combine of
the first with the experts of the second; backward mirrors it. Shared experts overlap with the dispatch of
the first half. The matmuls of `halves` have half of the rows each.

The frames that launch and wait are not compiled; the experts and the functions on rows that they call are.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from meshwright.models.layers.moe import Compute, Dispatch, RowInputs, Shared
from meshwright.ops.async_rows import RowExchange
from meshwright.ops.expert_rows import ExpertRows, rows_by_expert, rows_of_tokens, sum_of_rows
from meshwright.ops.routed_rows import RowCounts


class SharedOverlapDispatch(nn.Module):
    """Runs the shared experts while rows are in flight to the ranks of their experts."""

    def __init__(self, inner: Dispatch, group: ProcessGroup, row_counts: RowCounts) -> None:
        super().__init__()
        self.inner, self.group, self.row_counts = inner, group, row_counts

    @torch.compiler.disable(recursive=False)
    def forward(
        self, x_TD: Tensor, experts_TC: Tensor, inputs_TC: RowInputs, compute: Compute, shared: Shared
    ) -> tuple[Tensor, Tensor | None]:
        """The same result as the inner dispatch. Communicates over ep."""
        sorted_rows = [self.inner.sort(experts_TC)]
        (routes,) = exchange_counts(sorted_rows, self.group, self.row_counts)
        to_experts = launch_dispatch(routes, x_TD, inputs_TC)
        shared_BSD = shared()
        back = run_experts(routes, to_experts, compute)
        return finish_combine(routes, back).to(x_TD.dtype), shared_BSD


class HalvesDispatch(nn.Module):
    """Exchanges the rows of one half of the tokens while the experts of the other half run."""

    def __init__(self, inner: Dispatch, group: ProcessGroup, row_counts: RowCounts) -> None:
        super().__init__()
        self.inner, self.group, self.row_counts = inner, group, row_counts

    @torch.compiler.disable(recursive=False)
    def forward(
        self, x_TD: Tensor, experts_TC: Tensor, inputs_TC: RowInputs, compute: Compute, shared: Shared
    ) -> tuple[Tensor, Tensor | None]:
        """The same result as the inner dispatch. Communicates over ep."""
        sorted_rows = [self.inner.sort(half_TC) for half_TC in _halves(experts_TC)]
        both = exchange_counts(sorted_rows, self.group, self.row_counts)
        to_experts = [
            launch_dispatch(routes, half_TD, inputs_TC.each(lambda x_TC: _halves(x_TC)[index]))  # noqa: B023  called at once
            for index, (routes, half_TD) in enumerate(zip(both, _halves(x_TD), strict=True))
        ]
        shared_BSD = shared()
        back = [run_experts(routes, rows, compute) for routes, rows in zip(both, to_experts, strict=True)]
        halves = [finish_combine(routes, rows) for routes, rows in zip(both, back, strict=True)]
        return torch.cat(halves).to(x_TD.dtype), shared_BSD


class Routes(NamedTuple):
    """Which rows of some tokens go to the experts of other ranks, and which come from there."""

    rows: ExpertRows
    """Rows of this rank's tokens by expert."""
    received_RE: Tensor
    """Rows that come from each rank for each local expert."""
    sent: list[int]
    received: list[int]
    group: ProcessGroup


class InFlight(NamedTuple):
    """Rows that were launched and not yet waited for."""

    exchange: RowExchange
    x_ND: Tensor


class Dispatched(NamedTuple):
    """Rows in flight to the experts with their weights and dropout keys, and where they belong there."""

    rows: InFlight
    weights: InFlight
    dropout_keys: InFlight | None
    here: ExpertRows


def exchange_counts(
    sorted_rows: list[tuple[ExpertRows, Tensor]], group: ProcessGroup, row_counts: RowCounts
) -> list[Routes]:
    """The routes of sets of rows with their counts_E, from one exchange of counts over ep."""
    sent_RKE = torch.stack([counts_E.view(group.size(), -1) for _, counts_E in sorted_rows], dim=1)
    received_RKE = torch.empty_like(sent_RKE)
    dist.all_to_all_single(received_RKE, sent_RKE, group=group)
    found = []
    for index, (rows, _) in enumerate(sorted_rows):
        received_RE = received_RKE[:, index]
        # Host sync: the sizes of the exchange must be known before it.
        sent, received = row_counts.exchanged(sent_RKE[:, index], received_RE, len(rows.choice_N))
        found.append(Routes(rows, received_RE, sent, received, group))
    return found


def launch_dispatch(routes: Routes, x_TD: Tensor, inputs_TC: RowInputs) -> Dispatched:
    """Launch the rows of these tokens and what belongs to them to the ranks of their experts."""
    rows = _launch(rows_of_tokens(x_TD, routes.rows), routes.sent, routes.received, routes.group)
    weights_N1, keys_N1 = inputs_TC.each(lambda x_TC: routes.rows.choices(x_TC)[:, None])
    weights = _launch(weights_N1, routes.sent, routes.received, routes.group)
    keys = None if keys_N1 is None else _launch(keys_N1, routes.sent, routes.received, routes.group)
    return Dispatched(rows, weights, keys, received_rows(routes.received_RE, sum(routes.received)))


def run_experts(routes: Routes, to_experts: Dispatched, compute: Compute) -> InFlight:
    """Wait for the rows, run this rank's experts on them, and launch the results back."""
    x_ND, here, keys = _wait(to_experts.rows), to_experts.here, to_experts.dropout_keys
    inputs_N1 = RowInputs(_wait(to_experts.weights), None if keys is None else _wait(keys))
    y_ND = compute(x_ND, here, inputs_N1.each(here.choices), routes.received_RE.sum(0))
    # One choice for each received row, so the sum is the inverse permutation.
    return _launch(sum_of_rows(y_ND, here), routes.received, routes.sent, routes.group)


def finish_combine(routes: Routes, back: InFlight) -> Tensor:
    """y_TD: the sum of each token's rows, once they are back."""
    return sum_of_rows(_wait(back), routes.rows)


def received_rows(counts_RE: Tensor, num_rows: int) -> ExpertRows:
    """Received rows by local expert; they arrive sorted by (rank, expert), `counts_RE` of each."""
    num_experts = counts_RE.shape[1]
    expert_of_run = torch.arange(num_experts, device=counts_RE.device).repeat(counts_RE.shape[0])
    expert_N = expert_of_run.repeat_interleave(counts_RE.flatten(), output_size=num_rows)
    return rows_by_expert(expert_N[:, None])


def _launch(x_ND: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> InFlight:
    exchange = RowExchange(sent, received, group)
    return InFlight(exchange, exchange.launch(x_ND))


def _wait(in_flight: InFlight) -> Tensor:
    return in_flight.exchange.wait(in_flight.x_ND)


def _halves(x_TD: Tensor) -> tuple[Tensor, Tensor]:
    middle = (len(x_TD) + 1) // 2
    return x_TD[:middle], x_TD[middle:]
