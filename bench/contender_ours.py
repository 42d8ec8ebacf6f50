"""Ours: the code of `meshwright train`, from the same RunSpec."""

from bench.contender import Job
from bench.ladder import without_rungs

from meshwright.bench.step import drawn_on, make_steps
from meshwright.bench.step_clock import StepClock
from meshwright.mesh import build_mesh, join_world, leave_world
from meshwright.train.build import build_training


def contend(job: Job, clock: StepClock) -> None:
    """See bench/contender.py."""
    mesh = build_mesh(job.run.parallel, join_world(job.run.device))
    with drawn_on(mesh.device), without_rungs(job.settings.get("without", ())) as adjust:
        training = build_training(job.run, mesh)
        adjust(training)
        make_steps(job.run, mesh, training, clock)
    leave_world()
