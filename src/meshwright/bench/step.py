"""The training step of `train` on random tokens: time, memory, loss and kernels."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.bench.machine_facts import machine_facts
from meshwright.bench.random_tokens import write_random_tokens
from meshwright.bench.step_clock import StepClock
from meshwright.mesh import Mesh, build_mesh, join_world, leave_world
from meshwright.models.decoder import Decoder
from meshwright.models.initialise import (
    fill,
    initial_std,
    nested_weights,
    packed_weights,
    reset_buffers,
    seed_of,
    stored_weights,
)
from meshwright.ops.nf4 import quantise_nf4
from meshwright.ops.nf4_nested import nest_absmax
from meshwright.optim.schedule import learning_rate
from meshwright.plan.workload.flops import flops_per_token
from meshwright.precision.fp8.stored import encode_stored, stored_scale, weight_amax
from meshwright.spec import ModelSpec, RunSpec
from meshwright.spec.adapter import adapter_parameters
from meshwright.spec.parameters import Parameter, parameters
from meshwright.train.build import build_data, build_training, seed_step
from meshwright.train.gc_control import gc_paused
from meshwright.train.step import Training, train_step

LARGEST_DATA_TOKENS = 1 << 23


def measure_step(run: RunSpec, *, seconds: float, warmup_steps: int = 4) -> dict[str, Any]:
    """Time the steps of a run on one rank; joins and leaves the world of ranks itself."""
    world = join_world(run.device)
    try:
        mesh = build_mesh(run.parallel, world)
        training = build_training(run, mesh, fill=fill_on_device)
        clock = StepClock(mesh.device, seconds=seconds, warmup_steps=warmup_steps)
        make_steps(run, mesh, training, clock)
        return {**machine_facts(mesh.device), **clock.result(), **rates(run, clock.result())}
    finally:
        leave_world()


def measure_ranks(run: RunSpec, *, num_steps: int, warmup_steps: int = 2) -> float:
    """Median seconds of a step on the slowest rank; all ranks call it and make the same number of steps."""
    world = join_world(run.device, launch=run.launch)
    try:
        mesh = build_mesh(run.parallel, world)
        training = build_training(run, mesh, fill=fill_on_device)
        clock = StepClock(
            mesh.device, seconds=0.0, warmup_steps=warmup_steps, fewest_steps=num_steps, is_profiled=False
        )
        make_steps(run, mesh, training, clock)
        slowest = torch.tensor([clock.result()["step_seconds"]], dtype=torch.float64, device=mesh.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return float(slowest)
    finally:
        leave_world()


def make_steps(run: RunSpec, mesh: Mesh, training: Training, clock: StepClock) -> None:
    """The loop of `train` without logging and checkpoints, until the clock has timed enough steps."""
    batches = build_data(run, mesh)
    step, is_wanted = 0, True
    with gc_paused():
        while is_wanted:
            batch = next(batches)
            seed_step(run.seed, step)
            rate = learning_rate(run.optim, run.schedule, step, batch_tokens=run.data.batch_tokens)
            is_wanted = clock.after_step(train_step(training, batch, learning_rate=rate).loss)
            step += 1
    batches.close()


def rates(run: RunSpec, result: dict[str, Any]) -> dict[str, float]:
    """Tokens per second and model TFLOP/s per device at the median step."""
    tokens = run.data.batch_tokens / run.parallel.num_ranks / result["step_seconds"]
    strict = flops_per_token(run.model, run.data.sequence_length)
    return {"tokens_per_second": tokens, "teraflops": tokens * strict / 1e12}


@contextmanager
def on_random_tokens(run: RunSpec, *, mean_tokens: int | None = None) -> Iterator[RunSpec]:
    """The run with its data replaced by random tokens, in a temporary folder.

    With `mean_tokens`, documents are separate and have so many tokens on average; else they are joined.
    """
    data = run.data
    num_tokens = min(LARGEST_DATA_TOKENS, 64 * data.batch_tokens) + 1
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as parent:
        folder = Path(parent) / "tokens"
        write_random_tokens(
            folder,
            vocab_size=run.model.vocab_size,
            num_tokens=max(num_tokens, 2 * data.batch_tokens),
            mean_tokens=mean_tokens,
        )
        documents = "joined" if mean_tokens is None else "separate"
        yield run.with_(data=data.with_(path=str(folder), synthetic=None, documents=documents, shuffle=False))


@torch.no_grad()
def fill_on_device(model: Decoder, seed: int, *, device: torch.device) -> None:
    """A `Fill` in the place of `initialise`: the same distributions, drawn on the device.

    Drawing billions of numbers on one CPU core takes minutes. The numbers differ from those of `initialise`.
    """
    model.to_empty(device=device)
    listed = [*parameters(model.spec), *adapter_parameters(model.spec, model.adapter)]
    described = {parameter.name: parameter for parameter in listed}
    packed, nested = packed_weights(model), nested_weights(model)
    reset_buffers(model)
    stored = _fill_stored(model, described, seed, device)
    for name, tensor in model.named_parameters():
        if name not in described or name in stored:  # the absmax of packed weights is filled with them
            continue
        value = random_value(model.spec, described[name], seed, device)
        if name in packed:
            value, absmax = quantise_nf4(value)
            first = 0
            if name in nested:
                first, held = nested[name].first_expert, nested[name].experts if absmax.ndim > 2 else ...
                absmax, table = nest_absmax(absmax[held].view(torch.float32))
                nested[name].value.copy_(table)
            fill(packed[name], absmax, first=first)
        fill(tensor, value)


def _fill_stored(
    model: Decoder, described: Mapping[str, Parameter], seed: int, device: torch.device
) -> set[str]:
    """Fill the weights that are stored in fp8, and return their names."""
    named, groups = dict(model.named_parameters()), stored_weights(model)
    for scale, names in groups:
        values = [random_value(model.spec, described[name], seed, device) for name in names]
        full = stored_scale(torch.stack([weight_amax(value) for value in values]).amax(0))
        scale.value.copy_(full[... if scale.experts is None else scale.experts])
        for name, value in zip(names, values, strict=True):
            fill(named[name], encode_stored(value, full))
    return {name for _, names in groups for name in names}


def random_value(spec: ModelSpec, parameter: Parameter, seed: int, device: torch.device) -> Tensor:
    """One initial tensor: ones for norms, zeros for biases, else normal numbers from the name's own seed."""
    if parameter.kind in ("norm", "bias", "lora_B", "magnitude", "token_rows"):
        return torch.full(parameter.shape, float(parameter.kind in ("norm", "magnitude")), device=device)
    generator = torch.Generator(device).manual_seed(seed_of(seed, parameter.name))
    value = torch.empty(parameter.shape, device=device)
    if parameter.kind == "lora_A":
        bound = parameter.shape[-1] ** -0.5
        return value.uniform_(-bound, bound, generator=generator)
    return value.normal_(0.0, initial_std(spec, parameter), generator=generator)
