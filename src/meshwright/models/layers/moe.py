"""Routed experts in place of the dense MLP: dropless unless a capacity is set."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.hardware.simulated_device import SimulatedDevice
from meshwright.models.layers.mlp import SwiGlu
from meshwright.models.layers.routing import Capacity, InjectLoss, LoadBalanceLoss, Router, Routing
from meshwright.ops.grouped_mm import count_groups, grouped_linear
from meshwright.ops.routed_rows import RoutedRowCounts, RowCounts
from meshwright.ops.sharded import local
from meshwright.spec import MoeSpec

Compute = Callable[[Tensor, Tensor], Tensor]


class Experts(nn.Module):
    """SwiGLU experts as stacked tensors; the first dim is the expert."""

    def __init__(self, moe: MoeSpec, width: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(moe.num_experts, moe.width, width))
        self.up = nn.Parameter(torch.empty(moe.num_experts, moe.width, width))
        self.down = nn.Parameter(torch.empty(moe.num_experts, width, moe.width))
        # Set in a rehearsal: the device whose kernels are chosen.
        self.simulated: SimulatedDevice | None = None

    def forward(self, x_ND: Tensor, counts_E: Tensor) -> Tensor:
        """y_ND for tokens sorted by expert; `counts_E` is the number of tokens of each local expert."""
        gate_NF = grouped_linear(x_ND, local(self.gate), counts_E, self.simulated)
        up_NF = grouped_linear(x_ND, local(self.up), counts_E, self.simulated)
        h_NF = functional.silu(gate_NF) * up_NF
        return grouped_linear(h_NF, local(self.down), counts_E, self.simulated)


class Dispatch(nn.Module):
    """Permutes tokens to their experts and back (token dispatcher); ep wraps it."""

    def __init__(self, moe: MoeSpec, row_counts: RowCounts) -> None:
        super().__init__()
        self.row_counts = row_counts
        self.num_experts = moe.num_experts
        self.capacity_factor = moe.capacity_factor

    def forward(self, x_TD: Tensor, experts_TC: Tensor, weights_TC: Tensor, compute: Compute) -> Tensor:
        """Sum over each token's choices of weight x expert(x). Expert id E means: no expert."""
        num_choices = experts_TC.shape[1]
        order_N = experts_TC.flatten().argsort(stable=True)  # the tokens of one expert are contiguous
        counts_E = count_groups(experts_TC, self.num_experts)
        if self.capacity_factor is not None:  # host sync: dropped choices sort to the end
            num_kept = self.row_counts.within_capacity(counts_E, len(order_N), self.capacity_factor)
            order_N = order_N[:num_kept]
        y_ND = compute(x_TD[order_N // num_choices], counts_E)
        back_ND = y_ND.new_zeros(experts_TC.numel(), y_ND.shape[-1]).index_copy(0, order_N, y_ND)
        weighted_TCD = back_ND.unflatten(0, (-1, num_choices)) * weights_TC[..., None]
        return weighted_TCD.sum(1).to(x_TD.dtype)


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
        y_TD = self.dispatch(
            x_BSD.flatten(0, 1), experts_BSC.flatten(0, 1), weights_BSC.flatten(0, 1), self.experts
        )
        y_BSD = y_TD.view_as(x_BSD)
        if self.shared is not None:
            y_BSD = y_BSD + self.shared(x_BSD)
        return self._with_balance(y_BSD, routing, sequence_weights_B)

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
