"""One process of a run: join the others, look after the run directory, train, leave."""

import gc
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.checkpoint.run_checkpoints import require_same_course
from meshwright.errors import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    CheckpointError,
    MeshwrightError,
    SpecError,
)
from meshwright.mesh import World, abandon_world, join_world, leave_world, rejoin_world
from meshwright.resilience.shortage import prepare_device_groups
from meshwright.spec import RunSpec
from meshwright.spec.modules import FitSpec
from meshwright.spec.text import dump_run, load_run
from meshwright.spec.yaml_text import parse_yaml
from meshwright.train.capacity import lack_of_room, require_room
from meshwright.train.loop import Outcome, train
from meshwright.train.oom_report import smaller_microbatch


def run_rank(run: RunSpec, run_dir: Path, *, stop_after: int | None = None) -> int:
    """Train as the rank that the environment describes; returns the exit code."""
    if run.memory.on_oom == "halve_microbatch":
        prepare_device_groups()
    world = join_world(run.device)
    try:
        on_first_rank(lambda: require_room(run, world.device))
        on_first_rank(lambda: claim_directory(run, run_dir))
        outcome = train_on(run, world, run_dir, stop_after=stop_after)
        is_as_asked = outcome.kind == "finished" or (stop_after or 2**63) <= outcome.state.step
        leave_world()
        return EXIT_DONE if is_as_asked else EXIT_INTERRUPTED
    except BaseException as error:
        abandon_world(world)  # other ranks may be anywhere: nothing here may wait for them
        told = lack_of_room(error, run_dir, rank=world.rank)
        if told is None:
            raise
        raise told from None


def train_on(run: RunSpec, world: World, run_dir: Path, *, stop_after: int | None = None) -> Outcome:
    """Train; after a shortage of memory once more from the same batch, in smaller micro-batches."""
    outcome = train(run, world, run_dir, stop_after=stop_after)
    attempt = 0
    while outcome.kind == "short":
        smaller, attempt = smaller_microbatch(run), attempt + 1
        assert smaller is not None, "the attempt before would have raised"
        run = smaller
        release_memory(world.device)
        rejoin_world(world, attempt)
        outcome = train(run, world, run_dir, stop_after=stop_after, carried=outcome.carried, attempt=attempt)
    return outcome


def release_memory(device: torch.device) -> None:
    """What the program of the attempt before held goes back to the device."""
    gc.collect()  # modules and their hooks hold each other
    if device.type == "cuda":
        torch.cuda.empty_cache()


def on_first_rank(action) -> None:
    """Rank 0 does it; a refusal is raised on every rank."""
    refusal: list[MeshwrightError | None] = [None]
    if dist.get_rank() == 0:
        try:
            action()
        except MeshwrightError as error:
            refusal[0] = error
    dist.broadcast_object_list(refusal, src=0)
    if refusal[0] is not None:
        raise refusal[0]


def claim_directory(run: RunSpec | FitSpec, run_dir: Path) -> None:
    """Make the run directory this run's; refuse one that holds another run."""
    kept = run_dir / "run.yaml"
    if kept.exists() and (run_dir / "metrics.jsonl").exists():
        _require_same_run(run, kept)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        draft = run_dir / ".run.yaml"
        draft.write_text(dump_run(run))
        os.replace(draft, kept)
    except OSError as error:
        is_file = isinstance(error, FileExistsError | NotADirectoryError)
        why = "a file is in the way" if is_file else error.strerror or error
        raise SpecError(
            f"the run directory cannot be written: {why}",
            where=str(run_dir),
            hint="name another: --dir, or directory= in Python",
        ) from None


def _require_same_run(run: RunSpec | FitSpec, kept: Path) -> None:
    try:
        before = _read_kept(run, kept)
    except MeshwrightError as error:
        raise CheckpointError(
            f"the run.yaml of this directory cannot be read: {error.fact}",
            where=str(kept),
            hint="name another directory with --dir",
        ) from None
    require_same_course(run, before, kept.parent)


def _read_kept(run: RunSpec | FitSpec, kept: Path) -> dict[str, Any]:
    if isinstance(run, RunSpec):
        return load_run(kept).model_dump(mode="json")
    found = parse_yaml(kept.read_text(), str(kept)).value
    return found if isinstance(found, dict) else {}
