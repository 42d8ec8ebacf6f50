"""Ours: the code of `meshwright train`, from the same RunSpec."""

import gc
import time
from collections.abc import Iterator

import torch
from bench.contenders.protocol import Job
from bench.interleaved.clock import TurnClock

from meshwright.bench.step import drawn_on
from meshwright.data.batches import Batch, Batches
from meshwright.mesh import Mesh, build_mesh, join_world, leave_world
from meshwright.optim.schedule import learning_rate
from meshwright.spec import RunSpec
from meshwright.train.build import build_data, build_training, seed_step
from meshwright.train.gc_control import collector_off
from meshwright.train.step import train_step

# Both ends and one between: every kind of block that a model has.
FEW_LAYERS = 3


def compile_ahead(job: Job) -> float:
    """Steps of a model of few layers: what the compiler makes of its blocks serves the whole one. Seconds."""
    started_at = time.perf_counter()
    few = min(FEW_LAYERS, job.run.model.num_layers)
    run = job.run.with_(model=job.run.model.with_(num_layers=few))
    mesh = build_mesh(run.parallel, join_world(run.device))
    with drawn_on(mesh.device):
        training, batches = build_training(run, mesh), build_data(run, mesh)
        for _ in range(2):  # gradients are there already in the second
            train_step(training, next(batches), learning_rate=run.optim.lr)
        batches.close()
    del training, batches
    gc.collect()  # a model and its hooks hold each other
    if job.device.type == "cuda":
        torch.cuda.empty_cache()
    return time.perf_counter() - started_at


def contend(job: Job, clock: TurnClock) -> None:
    """See bench/contenders/protocol.py."""
    mesh = build_mesh(job.run.parallel, join_world(job.run.device))
    with drawn_on(mesh.device), collector_off():
        training = build_training(job.run, mesh)
        for step, (run, batch) in enumerate(batches_of(job.run, mesh, clock)):
            seed_step(run.seed, step)
            rate = learning_rate(run.optim, run.schedule, step, batch_tokens=run.data.batch_tokens)
            if not clock.after_step(train_step(training, batch, learning_rate=rate).loss):
                break
    leave_world()


def batches_of(run: RunSpec, mesh: Mesh, clock: TurnClock) -> Iterator[tuple[RunSpec, Batch]]:
    """Batches without end, each with as many micro-batches as the clock says at the moment."""
    loaders: dict[int, tuple[RunSpec, Batches]] = {}
    try:
        while True:
            if clock.times not in loaders:
                data = run.data.with_(batch_sequences=clock.times * run.data.batch_sequences)
                larger = run.with_(data=data)
                loaders[clock.times] = (larger, build_data(larger, mesh))
            asked, batches = loaders[clock.times]
            yield asked, next(batches)
    finally:
        for _, batches in loaders.values():
            batches.close()
