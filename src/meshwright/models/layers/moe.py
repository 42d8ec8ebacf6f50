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
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.hardware.simulated_device import SimulatedDevice
from meshwright.models.layers.adapter import ExpertAdapter
from meshwright.models.layers.experts_stored import StoredExperts
from meshwright.models.layers.mlp import SwiGlu
from meshwright.models.layers.routing import Capacity, InjectLoss, LoadBalanceLoss, Router, Routing
from meshwright.ops.cast import compute_dtype
from meshwright.ops.dropout_keys import mixed
from meshwright.ops.expert_rows import ExpertRows, rows_by_expert, rows_of_tokens_twice, sum_of_rows
from meshwright.ops.grouped_mm import count_groups, grouped_linear
from meshwright.ops.nf4_grouped import Nf4Experts, nf4_grouped_linear
from meshwright.ops.nf4_nested import NestedTable
from meshwright.ops.routed_rows import RoutedRowCounts, RowCounts
from meshwright.ops.sharded import local
from meshwright.precision.fp8.stored import Fp8Scale, decode_stored
from meshwright.spec import MoeSpec


class RowInputs(NamedTuple):
    """What experts read of each choice besides the token: [T, C], or [N] of rows sorted by expert."""

    weights: Tensor
    dropout_keys: Tensor | None
    """Keys of the dropout masks of experts' adapters."""

    def each(self, change: Callable[[Tensor], Tensor]) -> "RowInputs":
        """The same with `change` applied to every tensor."""
        keys = self.dropout_keys
        return RowInputs(change(self.weights), None if keys is None else change(keys))


Compute = Callable[[Tensor, ExpertRows, RowInputs, Tensor], Tensor]
"""(x_TD, rows, inputs_N, counts_E) -> y_ND: each row's weight x expert(x of its token)."""
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


PROJECTIONS = ("gate", "up", "down")
"""The parameters of `Experts`."""


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
        # Set by projection where the absmax is quantised too (nested NF4): NestedTables. It then has codes.
        self.nested: nn.ModuleDict | None = None
        # Set by projection where the frozen weights are stored in fp8: Fp8Scales. They are then bytes.
        self.scales: nn.ModuleDict | None = None
        # Set where the experts are frozen: ExpertAdapters by projection.
        self.adapters: nn.ModuleDict | None = None
        # Set in a rehearsal: the device whose kernels are chosen.
        self.simulated: SimulatedDevice | None = None

    def forward(self, x_TD: Tensor, rows: ExpertRows, inputs_N: RowInputs, counts_E: Tensor) -> Tensor:
        """y_ND, weight x expert(x) of each row; `counts_E` is the number of rows of each local expert."""
        weights_EFD = (self._weight("gate"), self._weight("up"))
        xs_ND = rows_of_tokens_twice(x_TD, rows)
        gate_NF, up_NF = self.gate_up_matmul(xs_ND, weights_EFD, counts_E, self.simulated)
        weights_N, keys_N = inputs_N
        gate_NF = self._adapted("gate", xs_ND[0], gate_NF, counts_E, keys_N)
        up_NF = self._adapted("up", xs_ND[1], up_NF, counts_E, keys_N)
        h_NF = (functional.silu(gate_NF) * up_NF * weights_N[:, None]).to(gate_NF.dtype)
        (y_ND,) = self.down_matmul((h_NF,), (self._weight("down"),), counts_E, self.simulated)
        return self._adapted("down", h_NF, y_ND, counts_E, keys_N)

    def _weight(self, projection: str) -> Tensor | Nf4Experts | StoredExperts:
        """This rank's weights of a projection."""
        weight, absmax = getattr(self, projection), getattr(self, f"{projection}_absmax")
        scale, nested = self.scale_of(projection), self.nested_of(projection)
        if scale is not None:
            return StoredExperts(local(weight), scale.value)
        if absmax is None:
            return local(weight)
        if nested is None:
            return Nf4Experts(local(weight), local(absmax))
        return Nf4Experts(local(weight), local(absmax), nested.value, nested.place)

    def scale_of(self, projection: str) -> Fp8Scale | None:
        """The scales of a projection that is stored in fp8."""
        return None if self.scales is None else self.scales[projection]  # pyright: ignore[reportReturnType]

    def nested_of(self, projection: str) -> NestedTable | None:
        """The table of a projection in nested NF4."""
        return None if self.nested is None else self.nested[projection]  # pyright: ignore[reportReturnType]

    def _adapted(
        self, projection: str, x: Tensor, y: Tensor, counts_E: Tensor, dropout_keys_N: Tensor | None
    ) -> Tensor:
        """The output of a projection, with what the experts' adapters add."""
        if self.adapters is None or projection not in self.adapters:
            return y
        adapter = self.adapters[projection]
        assert isinstance(adapter, ExpertAdapter)
        if adapter.magnitude is None:
            return adapter(x, y, counts_E, self.simulated, dropout_keys_N=dropout_keys_N)
        return adapter(
            x,
            y,
            counts_E,
            self.simulated,
            dropout_keys_N=dropout_keys_N,
            weight_EFD=self.frozen_weight(projection, compute_dtype(x)),
            frozen=lambda dropped: self._frozen_output(projection, dropped, counts_E),
        )

    def _frozen_output(self, projection: str, x: Tensor, counts_E: Tensor) -> Tensor:
        """The output of the frozen weights of one projection; with `fp8.experts` in bf16."""
        weight = self._weight(projection)
        if isinstance(weight, StoredExperts):  # there is no other copy
            matmul = self.down_matmul if projection == "down" else self.gate_up_matmul
            return matmul((x,), (weight,), counts_E, self.simulated)[0]
        if isinstance(weight, Nf4Experts):
            return nf4_grouped_linear(x, weight, counts_E, compute_dtype(x), self.simulated)
        return grouped_linear(x, weight, counts_E, self.simulated)

    def frozen_weight(self, projection: str, dtype: torch.dtype) -> Tensor:
        """This rank's weights of a projection; NF4 and stored fp8 are dequantised to `dtype`."""
        weight = self._weight(projection)
        if isinstance(weight, StoredExperts):
            return decode_stored(*weight, dtype)
        return weight.dequantised(dtype) if isinstance(weight, Nf4Experts) else weight


class Dispatch(nn.Module):
    """Permutes tokens to their experts and back (token dispatcher); ep wraps it."""

    def __init__(self, moe: MoeSpec, row_counts: RowCounts) -> None:
        super().__init__()
        self.row_counts = row_counts
        self.num_experts = moe.num_experts
        self.capacity_factor = moe.capacity_factor

    def forward(
        self, x_TD: Tensor, experts_TC: Tensor, inputs_TC: RowInputs, compute: Compute, shared: Shared
    ) -> tuple[Tensor, Tensor | None]:
        """Sum over each token's choices of weight x expert(x), and the output of the shared experts.

        Expert id E means: no expert.
        """
        rows, counts_E = self.sort(experts_TC)
        y_ND = compute(x_TD, rows, inputs_TC.each(rows.choices), counts_E)
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
        # (index, number) of the parts of the sequence over tp, of which this rank routes one.
        self.sequence_shard: tuple[int, int] = 0, 1
        # Records since they were last read: choices per expert, and the sum of the auxiliary loss.
        self.register_buffer("load", torch.zeros(moe.num_experts, dtype=torch.int64), persistent=False)
        self.register_buffer("balance_loss", torch.zeros((), dtype=torch.float32), persistent=False)

    def forward(
        self,
        x_BSD: Tensor,
        *,
        sequence_weights_B: Tensor | None = None,
        dropout_keys_BS: Tensor | None = None,
    ) -> Tensor:
        """The output of the experts, before the residual add."""
        routing = self.router(x_BSD)
        experts_BSC, weights_BSC = self._within_capacity(routing)
        y_TD, shared_BSD = self.dispatch(
            x_BSD.flatten(0, 1),
            experts_BSC.flatten(0, 1),
            RowInputs(weights_BSC, self._choice_keys(dropout_keys_BS, experts_BSC)).each(_by_token),
            self.experts,
            partial(self._run_shared, x_BSD, dropout_keys_BS),
        )
        y_BSD = y_TD.view_as(x_BSD)
        if shared_BSD is not None:
            y_BSD = y_BSD + shared_BSD
        return self._with_balance(y_BSD, routing, sequence_weights_B)

    def _run_shared(self, x_BSD: Tensor, dropout_keys_BS: Tensor | None) -> Tensor | None:
        return None if self.shared is None else self.shared(x_BSD, dropout_keys_BS=dropout_keys_BS)

    def _choice_keys(self, dropout_keys_BS: Tensor | None, experts_BSC: Tensor) -> Tensor | None:
        """Keys of this rank's tokens for each expert that they chose."""
        if dropout_keys_BS is None or self.experts.adapters is None:
            return None
        index, num_shards = self.sequence_shard
        return mixed(dropout_keys_BS.chunk(num_shards, 1)[index][..., None], experts_BSC)

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
        if not (y_BSD.requires_grad or loss.requires_grad):  # no backward will record what is frozen
            self.load += counts_E
            self.balance_loss += loss
            return y_BSD
        return InjectLoss.apply(y_BSD, loss, counts_E, self.load, self.balance_loss)


def _by_token(x_BSC: Tensor) -> Tensor:
    return x_BSC.flatten(0, 1)
