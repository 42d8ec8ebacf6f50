"""Expert load balance of a step over all ranks, and the bias-based balancing that evens it out."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.mesh import Mesh
from meshwright.models.balance import pop_routing_records, update_balance_bias
from meshwright.spec import ModelSpec


@dataclass(frozen=True)
class ExpertFigures:
    """Expert load since the figures were last read; 1 is perfect balance in all three."""

    aux_loss: float | None
    """Mean over layers and steps, before the coefficient; None where the model has no such loss."""
    load_max: float
    load_min: float


class ExpertBalance:
    """The routers of this rank's stages; every method is called by all ranks of a model with experts."""

    def __init__(
        self, model: ModelSpec, stages: list[nn.Module], mesh: Mesh, *, is_frozen: bool = False
    ) -> None:
        """With `is_frozen` the load is recorded, and the balance bias stays as it is."""
        assert model.moe is not None
        self._moe, self._stages = model.moe, stages
        self._num_layers = model.num_layers - model.moe.first_dense_layers
        self._groups = [mesh.data.get_group("data"), mesh.dense.get_group("tp")]
        self._has_bias = bool(model.moe.has_balance_bias and model.moe.balance_bias_rate) and not is_frozen
        self._loads: dict[str, Tensor] = {}
        self._aux_loss = torch.zeros((), dtype=torch.float64, device=mesh.device)
        self._num_steps = 0

    def after_step(self, *, scale: float, is_sound: bool) -> None:
        """Collect the routers' records of one step and update the balance bias. No host sync."""
        for stage in self._stages:
            records = pop_routing_records(stage)
            if not is_sound:  # gradients overflowed: the step did not happen
                continue
            loads = {name: load for name, (load, _) in records.items()}
            if self._has_bias:
                loads = self._reduced(loads)
                update_balance_bias(stage, loads)
            for name, load in loads.items():
                self._loads[name] = self._loads[name] + load if name in self._loads else load
            for _, loss in records.values():
                self._aux_loss += loss.double() / scale
        self._num_steps += is_sound

    def figures(self) -> ExpertFigures:
        """The figures over the whole world; counting then starts again. Communicates, host sync."""
        loads = self._loads if self._has_bias else self._reduced(self._loads)
        # A stage without experts contributes nothing: -inf never wins a maximum.
        extremes = torch.full((2,), -torch.inf, dtype=torch.float64, device=self._aux_loss.device)
        for load_E in loads.values():
            share_E = load_E.double() / load_E.double().mean()
            extremes = torch.maximum(extremes, torch.stack([share_E.max(), -share_E.min()]))
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
        dist.all_reduce(self._aux_loss)
        divisor = self._moe.aux_loss * self._num_layers * self._num_steps
        aux_loss = float(self._aux_loss) / divisor if divisor else None
        self._loads, self._num_steps = {}, 0
        self._aux_loss.zero_()
        return ExpertFigures(aux_loss=aux_loss, load_max=float(extremes[0]), load_min=-float(extremes[1]))

    def _reduced(self, loads: dict[str, Tensor]) -> dict[str, Tensor]:
        """The loads summed over every rank of the stage; each rank routes other tokens."""
        if not loads:
            return loads
        stacked_LE = torch.stack(list(loads.values()))
        for group in self._groups:
            dist.all_reduce(stacked_LE, group=group)
        return dict(zip(loads, stacked_LE, strict=True))
