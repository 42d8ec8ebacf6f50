"""Training steps of a run under torch's profiler, on every rank: the step is that of `train`.

First come steps without the profiler, which compile and warm up; the later ones of them are timed. Then come
the profiler's own warm-up and the recorded steps, and on ranks that keep their trace one more step with the
Python stacks, which would lengthen the others.
"""

import gzip
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from meshwright.errors import DataError
from meshwright.mesh import World
from meshwright.observe.profile.rank_profile import RankProfile, Recorded, rank_profile
from meshwright.observe.profile.steps import UNTIMED_STEPS, ProfileSteps
from meshwright.observe.profile.trace import DATA_RANGE, STEP_RANGE, Trace, read_trace
from meshwright.optim.schedule import learning_rate
from meshwright.spec import RunSpec
from meshwright.train.build import build_job, seed_step
from meshwright.train.gc_control import gc_paused
from meshwright.train.job import Job
from meshwright.train.step import train_step
from meshwright.train.torch_stage_ranges import stage_actions_named

_HOPPER = (9, 0)


@dataclass(frozen=True)
class RankRecording:
    """The profile of this rank, and what it recorded."""

    profile: RankProfile
    trace: Trace
    timed_seconds: float | None
    """A step without the profiler."""
    peak_bytes: int | None
    """The most memory that torch allocated on the device; None on a CPU."""


def record_rank(
    run: RunSpec, world: World, steps: ProfileSteps, *, folder: Path | None, with_stacks: bool
) -> RankRecording:
    """Build the run and profile its steps; all ranks call it. Traces are written to `folder`, if given."""
    job = build_job(run, world)
    if job.load_base is not None:
        job.load_base()
    job.load_initial_weights()
    if job.prepare_data is not None and run.preference is not None:
        with tempfile.TemporaryDirectory(prefix="meshwright-profile-") as scratch:
            job.prepare_data(Path(scratch), is_resumed=False)
    stepper = _Stepper(job)
    with gc_paused():
        timed, waited = stepper.timed(steps.wait)
        known = _known_tensors(job)
        document = stepper.recorded(steps, with_stacks=False)
        peak = torch.cuda.max_memory_allocated() if world.device.type == "cuda" else None
        stacks = stepper.recorded(ProfileSteps(0, 1, 1), with_stacks=True) if with_stacks else None
    job.batches.close()
    if folder is not None:
        _write(folder / f"trace-rank{world.rank}.json.gz", document)
        if stacks is not None:
            _write(folder / f"stacks-rank{world.rank}.json.gz", stacks)
    trace = read_trace(json.loads(document))
    is_hopper = peak is None or torch.cuda.get_device_capability() >= _HOPPER
    recorded = Recorded(timed, waited, known, is_hopper=is_hopper)
    return RankRecording(rank_profile(trace, recorded), trace, timed, peak)


class _Stepper:
    """Makes the steps of a job one after the other."""

    def __init__(self, job: Job) -> None:
        self._job, self._step = job, 0
        self._is_cuda = job.mesh.device.type == "cuda"

    def step(self) -> None:
        job, run = self._job, self._job.run
        with record_function(DATA_RANGE):
            batch = next(job.batches, None)
        if batch is None:
            raise DataError(
                f"the data ended after {self._step} steps",
                where="data",
                hint="use fewer --steps, or leave data.max_epochs out",
            )
        seed_step(run.seed, self._step)
        lr = learning_rate(run.optim, run.schedule, self._step, batch_tokens=run.data.batch_tokens)
        with record_function(STEP_RANGE):
            train_step(job.training, batch, learning_rate=lr)
        self._step += 1

    def timed(self, num_steps: int) -> tuple[float | None, float | None]:
        """Seconds of a step, and of its wait for data, without the profiler; None where too few are made."""
        for _ in range(min(UNTIMED_STEPS, num_steps)):
            self.step()
        self._synchronize()
        count = max(0, num_steps - UNTIMED_STEPS)
        started_at, waited = time.perf_counter(), self._job.batches.wait_seconds
        for _ in range(count):
            self.step()
        self._synchronize()
        if not count:
            return None, None
        waited = self._job.batches.wait_seconds - waited
        return (time.perf_counter() - started_at) / count, waited / count

    def recorded(self, steps: ProfileSteps, *, with_stacks: bool) -> bytes:
        """The Chrome trace of the active steps."""
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._is_cuda else [])]
        with (
            profile(
                activities=activities,
                schedule=schedule(wait=0, warmup=steps.warmup, active=steps.active, repeat=1),
                record_shapes=True,
                profile_memory=True,
                with_stack=with_stacks,
                acc_events=True,
            ) as recording,
            stage_actions_named(),
        ):
            for index in range(steps.warmup + steps.active):
                self.step()
                # Kernels of the warm-up must not run into the recorded steps, nor theirs past the end.
                if index in (steps.warmup - 1, steps.warmup + steps.active - 1):
                    self._synchronize()
                recording.step()
        with tempfile.TemporaryDirectory(prefix="meshwright-trace-") as scratch:
            path = Path(scratch) / "trace.json"
            recording.export_chrome_trace(str(path))
            return path.read_bytes()

    def _synchronize(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize()


def _known_tensors(job: Job) -> dict[int, tuple[str, int]]:
    """Category and bytes of the tensors that live across steps, by address."""
    program, optimizer = job.training.program, job.training.optimizer
    found: dict[int, tuple[str, int]] = {}

    def add(category: str, tensor: Any) -> None:
        if isinstance(tensor, torch.Tensor) and tensor.device.type == job.mesh.device.type:
            local = getattr(tensor, "to_local", lambda: tensor)()
            storage = local.untyped_storage()
            found.setdefault(storage.data_ptr(), (category, storage.nbytes()))

    parameters = [one for stage in program.stages for one in stage.parameters()]
    _add_all(add, "parameters", [*parameters, *(one.shard for one in program.shards)])
    _add_all(add, "gradients", [one.grad for one in parameters] + [one.shard.grad for one in program.shards])
    for state in optimizer.state.values():
        _add_all(add, "optimizer state", list(state.values()) if isinstance(state, dict) else [state])
    found.pop(0, None)
    return found


def _add_all(add: Callable[[str, Any], None], category: str, tensors: list[Any]) -> None:
    for tensor in tensors:
        add(category, tensor)


def _write(path: Path, document: bytes) -> None:
    with gzip.open(path, "wb", compresslevel=4) as stream:
        stream.write(document)
