"""Trains a user's module for three steps, in a plain torch loop and on a mesh, and compares the two."""

import dataclasses
import functools
from typing import Any

import torch
from tests.support.equivalence import gather_full, this_world
from tests.support.user_modules import BATCH, user_module
from torch import Tensor, nn

from meshwright.checkpoint.load_weights import persistent_buffers
from meshwright.mesh import build_mesh
from meshwright.modules.build_training import build_module_training
from meshwright.modules.dataset import DatasetMicrobatch
from meshwright.optim.schedule import learning_rate
from meshwright.precision.policy import weight_dtype
from meshwright.rehearse.rank_pool import rank_device
from meshwright.spec import MemorySpec, OptimSpec, ParallelSpec, PrecisionSpec, ScheduleSpec
from meshwright.spec.modules import FitSpec, SamplesSpec
from meshwright.train.evaluate import sum_over_world
from meshwright.train.step import train_step

NUM_STEPS = 3
OPTIMIZERS = {
    "sgd": OptimSpec(
        kind="sgd", lr=0.05, beta1=0.9, weight_decay=0.1, weight_decay_on="all", max_grad_norm=1.5
    ),
    "adamw": OptimSpec(
        kind="adamw", lr=0.01, eps=1e-5, weight_decay=0.1, weight_decay_on="all", max_grad_norm=1.0
    ),
}


def fit_spec(optim: str | OptimSpec = "sgd", *, microbatch_samples: int = 1, **changes: Any) -> FitSpec:
    """Settings of `fit` in float64; `changes` are fields of FitSpec."""
    spec = FitSpec(
        device="cpu",
        precision=PrecisionSpec(compute="fp64"),
        optim=OPTIMIZERS[optim] if isinstance(optim, str) else optim,
        schedule=ScheduleSpec(num_steps=NUM_STEPS, kind="constant"),
        data=SamplesSpec(batch_samples=BATCH, microbatch_samples=microbatch_samples),
    )
    return spec.with_(**changes) if changes else spec


@dataclasses.dataclass
class TrainedModule:
    """What three steps of a module computed, as unsharded tensors."""

    losses: list[float]
    grad_norms: list[float]
    gradients: list[dict[str, Tensor]]
    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]


@functools.cache
def train_plain_loop(name: str, optim: str) -> TrainedModule:
    """The reference: a plain torch loop over full batches in one process, without meshwright.

    Cached, because tests of several layouts compare with the same loop.
    """
    user, settings = user_module(name), OPTIMIZERS[optim]
    model = user.build().double()
    if optim == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(
            model.parameters(), lr=settings.lr, momentum=settings.beta1, weight_decay=settings.weight_decay
        )
    else:
        betas = (settings.beta1, settings.beta2)
        optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=settings.lr,
            betas=betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )
    losses, norms, gradients = [], [], []
    for step in range(NUM_STEPS):
        loss_sum, count = user.loss(model, user.batch(step))
        loss = loss_sum / count
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)))
        gradients.append(
            {
                key: torch.zeros_like(one) if one.grad is None else one.grad.clone()
                for key, one in model.named_parameters()
            }
        )
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    weights = {key: one.detach().clone() for key, one in model.named_parameters()}
    buffers = {key: one.clone() for key, one in model.named_buffers() if key in model.state_dict()}
    return TrainedModule(losses, norms, gradients, weights, buffers)


def microbatches_of_rank(batch: Any, spec: FitSpec, dp_rank: int) -> list[Any]:
    """The micro-batches of one data-parallel rank; ranks take them in turn (round robin)."""
    size, dp = spec.microbatch_samples, spec.parallel.dp
    starts = range(dp_rank * size, BATCH, dp * size)
    return [
        DatasetMicrobatch(tuple(_prepared(part[start : start + size], spec) for part in batch))
        for start in starts
    ]


def _prepared(part: Tensor, spec: FitSpec) -> Tensor:
    """The part on the rank's device; floating-point values in the dtype of the weights."""
    part = part.to(rank_device())
    return part.to(weight_dtype(spec.precision)) if part.is_floating_point() else part


@dataclasses.dataclass
class StepBatch:
    """The batch of one step on one rank, as `train_step` reads it."""

    microbatches: list[Any]


def train_on_mesh(name: str, spec: FitSpec) -> TrainedModule:
    """The same three steps on the mesh of a spec. All ranks of the mesh call it."""
    user = user_module(name)
    mesh = build_mesh(spec.parallel, this_world())
    model = user.build()
    if mesh.rank:  # other weights: building must bring all ranks to those of rank 0
        for parameter in model.parameters():
            nn.init.normal_(parameter)
    trial = tuple(part[: spec.microbatch_samples] for part in user.batch(0))
    training = build_module_training(model, user.loss, spec, mesh, trial)
    parts: dict[str, list[Tensor]] = {one.name: [] for one in training.program.shards}

    def before_update(*_: object) -> None:
        for one in training.program.shards:
            parts[one.name].append(one.shard.grad.clone())

    training.optimizer.register_step_pre_hook(before_update)
    losses, norms = [], []
    for step in range(NUM_STEPS):
        batch = StepBatch(microbatches_of_rank(user.batch(step), spec, mesh.dp_rank))
        rate = learning_rate(spec.optim, spec.schedule, step, batch_tokens=spec.data.batch_tokens)
        outcome = train_step(training, batch, learning_rate=rate)
        losses.append(float(sum_over_world(outcome.loss, mesh)))
        norms.append(float(outcome.grad_norm))
    full = {
        one.name: gather_full(one, [one.shard.detach(), *parts[one.name]]) for one in training.program.shards
    }
    buffers = persistent_buffers(training.program.stages)
    return TrainedModule(
        losses,
        norms,
        [{key: tensors[1 + step] for key, tensors in full.items()} for step in range(NUM_STEPS)],
        {key: tensors[0] for key, tensors in full.items()},
        {key: one.clone() for key, one in buffers.items()},
    )


def train_cases(name: str, specs: list[FitSpec]) -> list[TrainedModule]:
    """Train several specs of one world size in one job: importing transformers takes longer than training."""
    return [train_on_mesh(name, spec) for spec in specs]


def join_stages(results: list[TrainedModule]) -> TrainedModule:
    """One result out of those of pipeline ranks, each of which holds its own stages only."""
    first = results[0]
    for one in results:
        assert (one.losses, one.grad_norms) == (first.losses, first.grad_norms)
    return TrainedModule(
        first.losses,
        first.grad_norms,
        [{k: v for one in results for k, v in one.gradients[step].items()} for step in range(NUM_STEPS)],
        {k: v for one in results for k, v in one.weights.items()},
        {k: v for one in results for k, v in one.buffers.items()},
    )


def relative_errors(found: TrainedModule, expected: TrainedModule) -> dict[str, float]:
    """Quantity -> relative error, for every loss, norm, gradient, weight and buffer."""
    errors = {}
    for step in range(NUM_STEPS):
        errors[f"step {step} loss"] = abs(found.losses[step] / expected.losses[step] - 1)
        errors[f"step {step} norm"] = abs(found.grad_norms[step] / expected.grad_norms[step] - 1)
        errors |= _errors(f"step {step} gradient", found.gradients[step], expected.gradients[step])
    errors |= _errors("weight", found.weights, expected.weights)
    errors |= _errors("buffer", found.buffers, expected.buffers)
    return errors


def _errors(kind: str, found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    largest = max((float(one.abs().max()) for one in expected.values()), default=1.0)
    errors = {}
    for name, tensor in expected.items():
        # Gradients that are zero but for rounding (a bias before batch norm) are measured against the rest.
        scale = max(float(tensor.abs().max()), 1e-4 * largest)
        error = float((found[name].double() - tensor.double()).abs().max()) / scale if scale else 0.0
        errors[f"{kind} {name}"] = error if error == error else float("inf")
    return errors


def parallel(**axes: int) -> ParallelSpec:
    """A ParallelSpec, in a short form for the tables of tests."""
    return ParallelSpec(**axes)


def offload(what: str) -> MemorySpec:
    """A MemorySpec with offload, in a short form for the tables of tests."""
    return MemorySpec(offload=what)


def recompute(kind: str, every: int = 1) -> MemorySpec:
    """A MemorySpec with recompute, in a short form for the tables of tests."""
    return MemorySpec(recompute=kind, recompute_every=every)
