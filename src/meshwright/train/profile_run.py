"""A profile of a run: every rank records its steps, and rank 0 writes what they say."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.errors import SpecError
from meshwright.hardware.machine import this_machine
from meshwright.mesh import World, join_world, leave_world
from meshwright.observe.prediction_check import cluster_here, device_title
from meshwright.observe.profile.changes import Situation
from meshwright.observe.profile.document import (
    PAGE_FILE,
    PROFILE_FILE,
    ProfiledOn,
    RankResult,
    busiest,
    profile_document,
)
from meshwright.observe.profile.lanes import step_lanes
from meshwright.observe.profile.page import profile_page
from meshwright.observe.profile.pictures import pipeline_svg
from meshwright.observe.profile.pieces import pieces_of
from meshwright.observe.profile.pipeline_timeline import TIMELINE_FILE, measured_actions, timeline_document
from meshwright.observe.profile.steps import ProfileSteps
from meshwright.spec import RunSpec
from meshwright.spec.parallel import MESH_ORDER
from meshwright.train.profiled_steps import record_rank
from meshwright.train.session import on_first_rank


def profile_rank(
    run: RunSpec, folder: Path, steps: ProfileSteps, *, traced: frozenset[int], with_stacks: bool
) -> dict[str, Any] | None:
    """Profile as the rank that the environment describes; the document on rank 0, None on others.

    `traced` are the ranks that write their trace to `folder`. After an error the process groups of several
    ranks are left as they are, as in `train`.
    """
    world = join_world(run.device, resilience=run.resilience, launch=run.launch, run_dir=folder)
    try:
        on_first_rank(lambda: _make(folder))
        document = profile_in_world(run, world, folder, steps, traced, with_stacks=with_stacks)
    except BaseException:
        if world.num_ranks == 1:
            leave_world()
        raise
    leave_world()
    return document


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fact = f"the folder cannot be made: {error.strerror or error}"
        raise SpecError(fact, where=str(folder), hint="name another one with --out") from None


def profile_in_world(
    run: RunSpec,
    world: World,
    folder: Path,
    steps: ProfileSteps,
    traced: frozenset[int],
    *,
    with_stacks: bool,
) -> dict[str, Any] | None:
    """Profile in a world that is joined, into a folder that exists; all ranks call it. Communicates."""
    kept = folder if world.rank in traced else None
    recording = record_rank(run, world, steps, folder=kept, with_stacks=with_stacks)
    trace = recording.trace
    mine = RankResult(
        world.rank,
        recording.profile,
        recording.timed_seconds,
        recording.peak_bytes,
        step_lanes(trace, pieces_of(trace)),
        measured_actions(trace, rank=world.rank, pp_rank=_pp_rank(run, world.rank)),
    )
    gathered: list[Any] | None = [None] * world.num_ranks if world.is_first else None
    dist.gather_object(mine, gathered)
    return None if gathered is None else _write(run, world, folder, steps, gathered)


def _pp_rank(run: RunSpec, rank: int) -> int:
    """Position in the pipeline, which is the outermost axis."""
    assert MESH_ORDER[0] == "pp"
    return rank // (run.parallel.num_ranks // run.parallel.pp)


def _write(
    run: RunSpec, world: World, folder: Path, steps: ProfileSteps, results: list[RankResult]
) -> dict[str, Any]:
    """Write all files of the profile; returns its document. For rank 0."""
    cluster = cluster_here(run, world.device)
    on = ProfiledOn(
        device_title(world.device),
        torch.__version__,
        f"{steps.wait},{steps.warmup},{steps.active}",
        cluster,
    )
    machine = this_machine() if world.device.type == "cpu" else None
    situation = Situation(run, busiest(results).profile, cluster, machine)
    document = profile_document(results, run, on, situation)
    actions = [one.actions for one in results if one.actions is not None]
    timeline = timeline_document(actions, run.parallel, run.accumulation) if actions else None
    (folder / PROFILE_FILE).write_text(json.dumps(document) + "\n", encoding="utf-8")
    (folder / PAGE_FILE).write_text(profile_page(document, timeline), encoding="utf-8")
    if timeline is not None:
        (folder / TIMELINE_FILE).write_text(json.dumps(timeline) + "\n", encoding="utf-8")
        (folder / "timeline.svg").write_text(pipeline_svg(timeline), encoding="utf-8")
    return document
