"""A few training steps with everything recorded: losses, every gradient, and the full (unsharded) state."""

import dataclasses
import hashlib
from collections.abc import Callable

import torch
from torch import Tensor

from meshwright.memory.offload.host import synchronize
from meshwright.mesh import Mesh
from meshwright.optim.build import state_dims, state_tensors
from meshwright.optim.combined import optimizer_of
from meshwright.optim.schedule import learning_rate
from meshwright.parallel.shards import ParameterShard, unshard
from meshwright.spec import RunSpec
from meshwright.train.build import build_data, build_training, seed_step
from meshwright.train.evaluate import evaluate, sum_over_world
from meshwright.train.reference import Reference
from meshwright.train.step import StepOutcome, Training, train_step

# States of the weights' shape and dtype, which are gathered together with them.
LIKE_WEIGHTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
_NOT_STATES = ("weight", "ema")


@dataclasses.dataclass
class Trained:
    """The results of one rank; tensors are full (unsharded), by name, and of the rank's own stages only."""

    rank: int
    stage: int
    losses: list[float]
    grad_norms: list[float]
    gradients: list[dict[str, Tensor]]
    """Gradients of each step, after clipping."""
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    """State tensors by `parameter.state`."""
    buffers: dict[str, Tensor]
    ema: dict[str, Tensor]
    eval_loss: float
    digests: dict[str, str]
    """Hashes of the full weights, which must be equal on all ranks of a stage."""
    sample_ids: list[tuple[int, ...]]


class _Gradients:
    """Records this rank's shard of every gradient just before each update."""

    def __init__(self, training: Training) -> None:
        self._owned = {one.name: one for one in training.program.shards if one.parameter.requires_grad}
        self.parts: dict[str, dict[str, Tensor]] = {name: {} for name in self._owned}
        self._num_updates = 0
        self._optimizer = training.optimizer
        training.optimizer.register_step_pre_hook(self._keep)

    def _keep(self, *_: object) -> None:
        for name, one in self._owned.items():
            assert one.shard.grad is not None, f"{name} has no gradient"
            # Some optimizers clip when they read the gradient.
            factor = getattr(optimizer_of(self._optimizer, one.shard), "gradient_scale", 1.0)
            self.parts[name][f"gradient {self._num_updates}"] = one.shard.grad * factor
        self._num_updates += 1


def train_steps(
    run: RunSpec, mesh: Mesh, num_steps: int, *, step: Callable[..., StepOutcome] = train_step
) -> Trained:
    """Build, train and gather the results; all ranks of the mesh call it."""
    training, batches = build_training(run, mesh), build_data(run, mesh)
    reference = Reference(run, training.program, mesh, batches)
    reference.compute()
    gradients = _Gradients(training)
    losses, norms, sample_ids = [], [], []
    for index in range(num_steps):
        batch = next(batches)
        seed_step(run.seed, index)
        rate = learning_rate(run.optim, run.schedule, index, batch_tokens=run.data.batch_tokens)
        outcome = step(training, batch, learning_rate=rate)
        losses.append(float(sum_over_world(outcome.loss, mesh)))
        norms.append(float(outcome.grad_norm))
        sample_ids.append(batch.sample_ids)
    batches.close()
    synchronize(mesh.device)  # states that are still on their way to the host
    with training.weights.all_on_device():
        full = gather(run, training, gradients.parts)
    return Trained(
        rank=mesh.rank,
        stage=mesh.coordinate("pp"),
        losses=losses,
        grad_norms=norms,
        gradients=[_of_kind(full, f"gradient {index}") for index in range(num_steps)],
        weights=_of_kind(full, "weight"),
        optimizer=_states(full),
        buffers=_buffers(training),
        ema=_of_kind(full, "ema"),
        eval_loss=evaluate(run, training.program, mesh, reference=reference.table),
        digests={name: _digest(kinds["weight"]) for name, kinds in full.items()},
        sample_ids=sample_ids,
    )


def _of_kind(full: dict[str, dict[str, Tensor]], kind: str) -> dict[str, Tensor]:
    return {name: kinds[kind] for name, kinds in full.items() if kind in kinds}


def _states(full: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
    return {
        f"{name}.{key}": value
        for name, kinds in full.items()
        for key, value in kinds.items()
        if key not in _NOT_STATES and not key.startswith("gradient")
    }


def gather(
    run: RunSpec, training: Training, parts: dict[str, dict[str, Tensor]]
) -> dict[str, dict[str, Tensor]]:
    """Weight, optimizer states, EMA and the given shards of every parameter, unsharded. Communicates."""
    states = state_tensors(training.optimizer, training.named_shards, run.optim)
    averages = training.ema.averages if training.ema else {}
    found = {}
    for one in training.program.shards:
        kinds = {"weight": one.shard.detach(), **parts.get(one.name, {})}
        held = states.get(one.name, {})
        kinds |= {key: state.to(one.shard.device) for key, state in held.items() if key in LIKE_WEIGHTS}
        if one.name in averages:
            kinds["ema"] = averages[one.name]
        found[one.name] = dict(zip(kinds, gather_full(one, list(kinds.values())), strict=True))
        for key in sorted(held.keys() - kinds.keys()):
            part = one.as_global(held[key], state_dims(key, len(one.shape)))
            found[one.name][key] = unshard(part)
    return found


def gather_full(one: ParameterShard, parts: list[Tensor]) -> list[Tensor]:
    """Unshard tensors of the shard's shape; they are stacked in a last dim, so one gather serves all."""
    stacked = dataclasses.replace(one, shape=torch.Size([*one.shape, len(parts)]))
    return list(unshard(stacked.as_global(torch.stack(parts, dim=-1))).unbind(-1))


def _buffers(training: Training) -> dict[str, Tensor]:
    return {
        name: value.clone()
        for stage in training.program.stages
        for name, value in stage.named_buffers()
        if "balance_bias" in name
    }


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().cpu().numpy().tobytes()).hexdigest()[:16]
