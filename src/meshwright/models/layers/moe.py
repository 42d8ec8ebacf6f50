"""Routed experts in place of the dense MLP: dropless unless a capacity is set.

    x[N, D]  = the rows of x[T, D] sorted by expert; a token is C rows, one per choice      gather
    h[N, F]  = weight[N] silu(x gate^T) (x up^T)                                            grouped matmuls
    y[N, D]  = h down^T                                                                     grouped matmul
    y[T, D]  = the sum of each token's C rows                                               gather and sum

The router's weight scales h, which is narrower than y: y then needs no pass of its own and is not kept for
backward. A gather's gradient is a sum of rows and the other way round, so no kernel adds with atomics.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.hardware.simulated_device import SimulatedDevice
from meshwright.models.layers.adapter import ExpertAdapter
from meshwright.models.layers.mlp import SwiGlu
from meshwright.models.layers.routing import Capacity, InjectLoss, LoadBalanceLoss, Router, Routing
from meshwright.ops.cast import compute_dtype
from meshwright.ops.expert_rows import ExpertRows, rows_by_expert, rows_of_tokens_twice, sum_of_rows
from meshwright.ops.grouped_mm import count_groups, grouped_linear
from meshwright.ops.nf4 import dequantise_nf4
from meshwright.ops.nf4_grouped import Nf4Experts, nf4_grouped_linear
from meshwright.ops.routed_rows import RoutedRowCounts, RowCounts
from meshwright.ops.sharded import local
from meshwright.spec import MoeSpec

Compute = Callable[[Tensor, ExpertRows, Tensor, Tensor], Tensor]
"""(x_TD, rows, weights_N, counts_E) -> y_ND: each row's weight x expert(x of its token)."""
Shared = Callable[[], Tensor | None]
"""Runs the shared experts on the layer's input; None where the model has none."""


class GroupedLinears(nn.Module):
    """Grouped matmuls that share their rows; replaced where they run in fp8."""

    def forward(
        self,
        xs_ND: Sequence[Tensor],
        weights_EFD: Sequence[Tensor],
        counts_E: Tensor,
        simulated: SimulatedDevice | None = None,
    ) -> list[Tensor]:
        """y_NF of each weight; the xs are the same rows, once for each weight."""
        pairs = zip(xs_ND, weights_EFD, strict=True)
        return [grouped_linear(x_ND, weight_EFD, counts_E, simulated) for x_ND, weight_EFD in pairs]


class Nf4GroupedLinears(nn.Module):
    """Replaces `GroupedLinears` where the frozen weights are NF4."""

    def forward(
        self,
        xs_ND: Sequence[Tensor],
        weights: Sequence[Nf4Experts],
        counts_E: Tensor,
        simulated: SimulatedDevice | None = None,
    ) -> list[Tensor]:
        """y_NF of each weight; the xs are the same rows, once for each weight."""
        dtype = compute_dtype(xs_ND[0])
        pairs = zip(xs_ND, weights, strict=True)
        return [nf4_grouped_linear(x_ND, weight, counts_E, dtype, simulated) for x_ND, weight in pairs]


class Experts(nn.Module):
    """SwiGLU experts as stacked tensors; the first dim is the expert."""

    def __init__(self, moe: MoeSpec, width: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(moe.num_experts, moe.width, width))
        self.up = nn.Parameter(torch.empty(moe.num_experts, moe.width, width))
        self.down = nn.Parameter(torch.empty(moe.num_experts, width, moe.width))
        self.gate_up_matmul: nn.Module = GroupedLinears()
        self.down_matmul: nn.Module = GroupedLinears()
        # Set where the frozen weights are NF4: the weights are then packed, and these have their absmax.
        self.gate_absmax: nn.Parameter | None = None
        self.up_absmax: nn.Parameter | None = None
        self.down_absmax: nn.Parameter | None = None
        # Set where the experts are frozen: ExpertAdapters by projection.
        self.adapters: nn.ModuleDict | None = None
        # Set in a rehearsal: the device whose kernels are chosen.
        self.simulated: SimulatedDevice | None = None

    def forward(self, x_TD: Tensor, rows: ExpertRows, weights_N: Tensor, counts_E: Tensor) -> Tensor:
        """y_ND, weight x expert(x) of each row; `counts_E` is the number of rows of each local expert."""
        weights_EFD = (self._weight("gate"), self._weight("up"))
        xs_ND = rows_of_tokens_twice(x_TD, rows)
        gate_NF, up_NF = self.gate_up_matmul(xs_ND, weights_EFD, counts_E, self.simulated)
        gate_NF = self._adapted("gate", xs_ND[0], gate_NF, counts_E)
        up_NF = self._adapted("up", xs_ND[1], up_NF, counts_E)
        h_NF = (functional.silu(gate_NF) * up_NF * weights_N[:, None]).to(gate_NF.dtype)
        (y_ND,) = self.down_matmul((h_NF,), (self._weight("down"),), counts_E, self.simulated)
        return self._adapted("down", h_NF, y_ND, counts_E)

    def _weight(self, projection: str) -> Tensor | Nf4Experts:
        """This rank's weights of a projection."""
        weight, absmax = getattr(self, projection), getattr(self, f"{projection}_absmax")
        return local(weight) if absmax is None else Nf4Experts(local(weight), local(absmax))

    def _adapted(self, projection: str, x: Tensor, y: Tensor, counts_E: Tensor) -> Tensor:
        """The output of a projection, with what the experts' adapters add."""
        if self.adapters is None or projection not in self.adapters:
            return y
        adapter = self.adapters[projection]
        assert isinstance(adapter, ExpertAdapter)
        if adapter.magnitude is None:
            return adapter(x, y, counts_E, self.simulated)
        return adapter(x, y, counts_E, self.simulated, self.frozen_weight(projection, compute_dtype(x)))

    def frozen_weight(self, projection: str, dtype: torch.dtype) -> Tensor:
        """This rank's weights of a projection; NF4 is dequantised to `dtype`."""
        weight = self._weight(projection)
        return dequantise_nf4(*weight, dtype) if isinstance(weight, Nf4Experts) else weight


class Dispatch(nn.Module):
    """Permutes tokens to their experts and back (token dispatcher); ep wraps it."""

    def __init__(self, moe: MoeSpec, row_counts: RowCounts) -> None:
        super().__init__()
        self.row_counts = row_counts
        self.num_experts = moe.num_experts
        self.capacity_factor = moe.capacity_factor

    def forward(
        self, x_TD: Tensor, experts_TC: Tensor, weights_TC: Tensor, compute: Compute, shared: Shared
    ) -> tuple[Tensor, Tensor | None]:
        """Sum over each token's choices of weight x expert(x), and the output of the shared experts.

        Expert id E means: no expert.
        """
        rows, counts_E = self.sort(experts_TC)
        y_ND = compute(x_TD, rows, rows.choices(weights_TC), counts_E)
        return sum_of_rows(y_ND, rows).to(x_TD.dtype), shared()

    def sort(self, experts_TC: Tensor) -> tuple[ExpertRows, Tensor]:
        """The rows of these choices by expert, and counts_E, the number of rows of each expert."""
        counts_E = count_groups(experts_TC, self.num_experts)
        if self.capacity_factor is None:
            return rows_by_expert(experts_TC), counts_E
        # Host sync: dropped choices sort to the end.
        num_kept = self.row_counts.within_capacity(counts_E, experts_TC.numel(), self.capacity_factor)
        return rows_by_expert(experts_TC, num_kept), counts_E


class Moe(nn.Module):
    """Router, routed experts, and shared experts that see every token."""

    load: Tensor
    balance_loss: Tensor

    def __init__(self, moe: MoeSpec, width: int) -> None:
        super().__init__()
        self.moe = moe
        self.router = Router(moe, width)
        self.experts = Experts(moe, width)
        self.shared = SwiGlu(width, moe.shared_width) if moe.shared_width else None
        self.capacity: nn.Module | None = None if moe.capacity_factor is None else Capacity(moe)
        self.row_counts: RowCounts = RoutedRowCounts()
        self.dispatch: nn.Module = Dispatch(moe, self.row_counts)
        self.balance = LoadBalanceLoss(moe)
        # Records since they were last read: choices per expert, and the sum of the auxiliary loss.
        self.register_buffer("load", torch.zeros(moe.num_experts, dtype=torch.int64), persistent=False)
        self.register_buffer("balance_loss", torch.zeros((), dtype=torch.float32), persistent=False)

    def forward(self, x_BSD: Tensor, *, sequence_weights_B: Tensor | None = None) -> Tensor:
        """The output of the experts, before the residual add."""
        routing = self.router(x_BSD)
        experts_BSC, weights_BSC = self._within_capacity(routing)
        y_TD, shared_BSD = self.dispatch(
            x_BSD.flatten(0, 1),
            experts_BSC.flatten(0, 1),
            weights_BSC.flatten(0, 1),
            self.experts,
            partial(self._run_shared, x_BSD),
        )
        y_BSD = y_TD.view_as(x_BSD)
        if shared_BSD is not None:
            y_BSD = y_BSD + shared_BSD
        return self._with_balance(y_BSD, routing, sequence_weights_B)

    def _run_shared(self, x_BSD: Tensor) -> Tensor | None:
        return None if self.shared is None else self.shared(x_BSD)

    def _within_capacity(self, routing: Routing) -> tuple[Tensor, Tensor]:
        """The routing in which choices over the capacity have expert id E and weight 0."""
        if self.capacity is None:
            return routing.experts_BSC, routing.weights_BSC
        kept_BSC = self.capacity(routing.experts_BSC)
        experts_BSC = torch.where(kept_BSC, routing.experts_BSC, self.moe.num_experts)
        return experts_BSC, torch.where(kept_BSC, routing.weights_BSC, 0.0)

    def _with_balance(self, y_BSD: Tensor, routing: Routing, sequence_weights_B: Tensor | None) -> Tensor:
        if not torch.is_grad_enabled():
            return y_BSD
        loss = routing.scores_BSE.new_zeros(())
        if self.moe.aux_loss and sequence_weights_B is not None:
            loss = self.balance(routing, sequence_weights_B)
        counts_E = count_groups(routing.experts_BSC, self.moe.num_experts)
        return InjectLoss.apply(y_BSD, loss, counts_E, self.load, self.balance_loss)
