"""Ours: the code of `meshwright train`, from the same RunSpec."""

from bench.contender import Job
from bench.ladder import without_rungs

from meshwright.bench.step import drawn_on
from meshwright.bench.step_clock import StepClock
from meshwright.mesh import build_mesh, join_world, leave_world
from meshwright.optim.schedule import learning_rate
from meshwright.train.build import build_data, build_training, seed_step
from meshwright.train.step import train_step


def contend(job: Job, clock: StepClock) -> None:
    """See bench/contender.py."""
    run = job.run
    mesh = build_mesh(run.parallel, join_world(run.device))
    with drawn_on(mesh.device), without_rungs(job.settings.get("without", ())) as adjust:
        training, batches = build_training(run, mesh), build_data(run, mesh)
        adjust(training)
        step, more = 0, True
        while more:
            batch = next(batches)
            seed_step(run.seed, step)
            rate = learning_rate(run.optim, run.schedule, step, batch_tokens=run.data.batch_tokens)
            more = clock.after_step(train_step(training, batch, learning_rate=rate).loss)
            step += 1
    batches.close()
    leave_world()
