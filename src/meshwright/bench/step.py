"""Our own training step as `train` makes it, on random tokens: time, memory, loss, and kernels."""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from meshwright.bench.machine_facts import machine_facts
from meshwright.bench.random_tokens import write_random_tokens
from meshwright.bench.step_clock import StepClock
from meshwright.mesh import Mesh, build_mesh, join_world, leave_world
from meshwright.models.initialise import initial_std, seed_of
from meshwright.optim.schedule import learning_rate
from meshwright.plan.workload.flops import flops_per_token
from meshwright.spec import ModelSpec, RunSpec
from meshwright.spec.parameters import Parameter
from meshwright.train.build import build_data, build_training, seed_step
from meshwright.train.gc_control import collector_off
from meshwright.train.step import Training, train_step

LARGEST_DATA_TOKENS = 1 << 23


def measure_step(run: RunSpec, *, seconds: float, warmup_steps: int = 4) -> dict[str, Any]:
    """One rank's steps of a run, timed; joins and leaves the world of ranks by itself."""
    world = join_world(run.device)
    try:
        mesh = build_mesh(run.parallel, world)
        with drawn_on(mesh.device):
            training = build_training(run, mesh)
        clock = StepClock(mesh.device, seconds=seconds, warmup_steps=warmup_steps)
        make_steps(run, mesh, training, clock)
        return {**machine_facts(mesh.device), **clock.result(), **rates(run, clock.result())}
    finally:
        leave_world()


def make_steps(run: RunSpec, mesh: Mesh, training: Training, clock: StepClock) -> None:
    """The loop of `train` without records and checkpoints, until the clock has seen enough."""
    batches = build_data(run, mesh)
    step, is_wanted = 0, True
    with collector_off():
        while is_wanted:
            batch = next(batches)
            seed_step(run.seed, step)
            rate = learning_rate(run.optim, run.schedule, step, batch_tokens=run.data.batch_tokens)
            is_wanted = clock.after_step(train_step(training, batch, learning_rate=rate).loss)
            step += 1
    batches.close()


def rates(run: RunSpec, result: dict[str, Any]) -> dict[str, float]:
    """Tokens per second and model TFLOP/s of one device, at the median step."""
    tokens = run.data.batch_tokens / run.parallel.num_ranks / result["step_seconds"]
    strict = flops_per_token(run.model, run.data.sequence_length)
    return {"tokens_per_second": tokens, "teraflops": tokens * strict / 1e12}


@contextmanager
def on_random_tokens(run: RunSpec) -> Iterator[RunSpec]:
    """The run with its data replaced by random tokens in a folder that is removed afterwards."""
    data = run.data
    num_tokens = min(LARGEST_DATA_TOKENS, 64 * data.batch_tokens) + 1
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as parent:
        folder = Path(parent) / "tokens"
        write_random_tokens(
            folder, vocab_size=run.model.vocab_size, num_tokens=max(num_tokens, 2 * data.batch_tokens)
        )
        yield run.with_(data=data.with_(path=str(folder), synthetic=None, documents="joined", shuffle=False))


@contextmanager
def drawn_on(device: torch.device) -> Iterator[None]:
    """Initial weights of the right spread drawn on the device: on one core billions of numbers take minutes.

    They differ from those of a run, and are the same for everyone who is measured.
    """
    module = sys.modules[initial_std.__module__]
    replaced = patch.object(
        module, "initial_value", lambda spec, parameter, seed: drawn(spec, parameter, seed, device)
    )
    with replaced:
        yield


def drawn(spec: ModelSpec, parameter: Parameter, seed: int, device: torch.device) -> Tensor:
    """One initial tensor: ones for norms, zeros for biases, else normal numbers by the name's own seed."""
    if parameter.kind in ("norm", "bias"):
        return torch.full(parameter.shape, float(parameter.kind == "norm"), device=device)
    generator = torch.Generator(device).manual_seed(seed_of(seed, parameter.name))
    value = torch.empty(parameter.shape, device=device)
    return value.normal_(0.0, initial_std(spec, parameter), generator=generator)
