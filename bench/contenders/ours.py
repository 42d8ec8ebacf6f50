"""Ours: the step of `meshwright train`, from the run file."""

import gc
import time
from collections.abc import Iterator

import torch
from bench.contenders.protocol import Clock, Job

from meshwright.bench.step import fill_on_device
from meshwright.data.batches import Batch, Batches
from meshwright.mesh import Mesh, build_mesh, join_world, leave_world
from meshwright.optim.schedule import learning_rate
from meshwright.spec import RunSpec
from meshwright.train.build import build_data, build_training, seed_step
from meshwright.train.gc_control import gc_paused
from meshwright.train.step import train_step

# The first, a middle and the last block: every kind of block that a model has.
FEW_LAYERS = 3


def compile_ahead(job: Job) -> float:
    """Seconds to compile the blocks in a model of few layers; their graphs serve the full model."""
    started_at = time.perf_counter()
    few = min(FEW_LAYERS, job.run.model.num_layers)
    run = job.run.with_(model=job.run.model.with_(num_layers=few))
    mesh = build_mesh(run.parallel, join_world(run.device))
    training, batches = build_training(run, mesh, fill=fill_on_device), build_data(run, mesh)
    for _ in range(2):  # from the second step on gradients exist already
        train_step(training, next(batches), learning_rate=run.optim.lr)
    batches.close()
    del training, batches
    gc.collect()  # a model and its hooks refer to each other
    if job.device.type == "cuda":
        torch.cuda.empty_cache()
    return time.perf_counter() - started_at


def contend(job: Job, clock: Clock) -> None:
    """Train in our own loop until the clock stops it."""
    mesh = build_mesh(job.run.parallel, join_world(job.run.device))
    with gc_paused():
        training = build_training(job.run, mesh, fill=fill_on_device)
        for step, (run, batch) in enumerate(batches_of(job.run, mesh, clock)):
            seed_step(run.seed, step)
            rate = learning_rate(run.optim, run.schedule, step, batch_tokens=run.data.batch_tokens)
            if not clock.after_step(train_step(training, batch, learning_rate=rate).loss):
                break
    leave_world()


def batches_of(run: RunSpec, mesh: Mesh, clock: Clock) -> Iterator[tuple[RunSpec, Batch]]:
    """Endless batches, each with as many micro-batches as the clock asks for, and the run of that size."""
    loaders: dict[int, tuple[RunSpec, Batches]] = {}
    try:
        while True:
            factor = clock.accumulation_factor
            if factor not in loaders:
                data = run.data.with_(batch_sequences=factor * run.data.batch_sequences)
                larger = run.with_(data=data)
                loaders[factor] = (larger, build_data(larger, mesh))
            asked, batches = loaders[factor]
            yield asked, next(batches)
    finally:
        for _, batches in loaders.values():
            batches.close()
