"""One rank of a run measured on this machine's GPU: real tensors and kernels, no other ranks.

Collectives return at once and leave their buffers as they were, so the numbers are meaningless. Bytes and
compute time are those of the rank; exposed communication is missing.
"""

import dataclasses
import gc
import json
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from meshwright.data.microbatch import Batch
from meshwright.errors import MeshError
from meshwright.hardware.prediction_log import store_pair
from meshwright.observe.metrics import METRICS_NAME
from meshwright.observe.prediction_check import pair_of, predict_here
from meshwright.ops.routed_rows import EvenRowCounts
from meshwright.parallel.simulation import Simulation
from meshwright.rehearse.torch_cublas import clear_cublas_workspaces
from meshwright.rehearse.trace import data_on_device, zero_batch
from meshwright.rehearse.world import fake_world
from meshwright.spec import RunSpec
from meshwright.spec.text import dump_run
from meshwright.train.build import build_training
from meshwright.train.step import Training, train_step

NUM_STEPS = 3


@dataclasses.dataclass(frozen=True)
class Measured:
    """Peak memory and compute time of one rank on this machine."""

    rank: int
    device: str
    """Name of the device."""
    allocated_bytes: int
    reserved_bytes: int
    step_seconds: float
    microbatch_seconds: float
    is_expandable: bool
    """Whether the caching allocator used expandable segments."""
    seconds: tuple[float, ...] = ()
    """Seconds of every step, the warm-up first."""


def measure_rank(run: RunSpec, rank: int, *, num_steps: int = NUM_STEPS, imbalance: float = 1.0) -> Measured:
    """Peak bytes and compute time of a rank on this machine's GPU; the first step is warm-up."""
    device = measuring_device(run)
    before = _clean(device)
    with fake_world(run.parallel, rank, device) as mesh:
        simulation = Simulation(row_counts=EvenRowCounts(imbalance))
        training = build_training(run, mesh, fill=fill_random, simulation=simulation)
        batch, kept = random_batch(run, device), data_on_device(run, device.type)
        seconds = _timed(training, batch, device, num_steps)
        median = statistics.median(seconds[1:] or seconds)
        found = Measured(
            rank=rank,
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            allocated_bytes=_statistic(device, "allocated_bytes.all.peak") - before,
            reserved_bytes=_statistic(device, "reserved_bytes.all.peak") - before,
            step_seconds=median,
            microbatch_seconds=median / run.accumulation,
            is_expandable="expandable_segments:True" in _allocator_settings(),
            seconds=tuple(seconds),
        )
        del training, batch, kept
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def log_prediction(run: RunSpec, measured: Sequence[Measured]) -> str | None:
    """Store predicted beside measured for this machine, and return the line that says so.

    None where there is nothing to compare: a rank of several never waits for the others here, so its step
    time is not that of the run.
    """
    device = measuring_device(run)
    prediction = predict_here(run, device)
    if prediction is None or run.parallel.num_ranks > 1:
        return None
    (only,) = measured
    pair = pair_of(
        run,
        device,
        prediction,
        peak_bytes=only.allocated_bytes,
        seconds=only.step_seconds,
        source="rehearse",
    )
    store_pair(pair)
    return pair.line


def write_measured(run: RunSpec, measured: Sequence[Measured], folder: Path) -> None:
    """Write run.yaml and metrics.jsonl of a measured run of one rank, as `plan --calibrate` reads them."""
    if run.parallel.num_ranks > 1:
        raise MeshError(
            f"the run has {run.parallel.num_ranks} ranks; one of them alone does not communicate",
            where="--dir",
            hint="measure a run of one rank, or calibrate with the run directory of `train`",
        )
    (only,) = measured
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.yaml").write_text(dump_run(run), encoding="utf-8")
    rows = [
        {"step": step, "step_seconds": seconds, "peak_bytes": only.allocated_bytes}
        for step, seconds in enumerate(only.seconds, start=1)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / METRICS_NAME).write_text(text, encoding="utf-8")


def _clean(device: torch.device) -> int:
    """Free what earlier work of this process left, and return the bytes that are still allocated."""
    gc.collect()
    if device.type != "cuda":
        return 0
    clear_cublas_workspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(device)


def measuring_device(run: RunSpec) -> torch.device:
    """The device on which a rank of this run is measured; MeshError where there is none."""
    if run.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise MeshError(
            "a rank is measured on a GPU, and torch sees none here",
            where="--measure",
            hint="leave --measure out: the trace needs no GPU",
        )
    return torch.device("cuda", torch.cuda.current_device())


@torch.no_grad()
def fill_random(model: nn.Module, seed: int, *, device: torch.device) -> None:
    """A `Fill` in the place of `initialise`: small random numbers drawn on the device, shard by shard."""
    model.to_empty(device=device)
    for parameter in model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter  # pyright: ignore
        local.fill_(1.0) if local.ndim < 2 else local.normal_(0.0, 0.02)
    for buffer in model.buffers():
        buffer.zero_()


def random_batch(run: RunSpec, device: torch.device) -> Batch:
    """One rank's share of a batch of random tokens."""
    batch = zero_batch(run, device.type)
    for part in batch.microbatches:
        part.tokens_BS.random_(0, run.model.vocab_size)
        part.targets_BS.random_(0, run.model.vocab_size)
        part.positions_BS.copy_(torch.arange(run.data.sequence_length, device=device))
        part.weights_BS.fill_(1.0 / run.data.batch_tokens)
        part.sequence_weights_B.fill_(1.0 / run.data.batch_sequences)
    return batch


def _timed(training: Training, batch: Batch, device: torch.device, num_steps: int) -> list[float]:
    """Seconds of each step; peak memory is counted from the second step on."""
    seconds: list[float] = []
    for step in range(num_steps):
        if step == 1:
            _reset(device)
        _wait(device)
        started_at = time.perf_counter()
        train_step(training, batch, learning_rate=1e-6)
        _wait(device)
        seconds.append(time.perf_counter() - started_at)
    return seconds


def _reset(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _statistic(device: torch.device, name: str) -> int:
    return torch.cuda.memory_stats(device)[name] if device.type == "cuda" else 0


def _allocator_settings() -> str:
    return os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
