"""One process of a run: join the other ranks, claim the run directory, train, leave."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from meshwright.checkpoint.load import complete_checkpoints
from meshwright.checkpoint.retain import remove_leftovers
from meshwright.checkpoint.run_checkpoints import allowed_changes
from meshwright.errors import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    CheckpointError,
    LostRank,
    MeshwrightError,
    RunError,
    SpecError,
)
from meshwright.files import read_text
from meshwright.mesh import World, join_world, leave_world
from meshwright.observe.events import events_path, read_events
from meshwright.observe.trackers.trackers import require_trackers
from meshwright.resilience.run_lock import run_lock
from meshwright.resilience.watchdog import silent_ranks
from meshwright.spec import RunSpec
from meshwright.spec.modules import FitSpec
from meshwright.spec.text import dump_run, load_run
from meshwright.spec.yaml_text import parse_yaml
from meshwright.train.capacity import capacity_error, one_line, require_capacity
from meshwright.train.loop import train

# A rank that lives has made progress, or is in a collective, since this long.
_ALIVE_SECONDS = 60.0


def run_rank(run: RunSpec, run_dir: Path, *, stop_after: int | None = None, quiet: bool = False) -> int:
    """Train as the rank that the environment describes; returns the exit code.

    After an error the process groups of several ranks are left as they are: others may be in any
    collective, and nothing here may wait for them. The caller ends the process.
    """
    world = join_world(run.device, resilience=run.resilience, launch=run.launch, run_dir=run_dir)
    if world.is_first and not quiet:
        print(*world.notes, sep="\n", end="\n" if world.notes else "", file=sys.stderr)
    try:
        on_first_rank(lambda: require_capacity(run, world.device))
        with claimed_directory(run, run_dir):
            outcome = train(run, world, run_dir, stop_after=stop_after, quiet=quiet)
    except BaseException as error:
        if world.num_ranks == 1:
            leave_world()
        clear = None if isinstance(error, MeshwrightError) else _clear_error(error, run_dir, world)
        if clear is None:
            raise
        raise clear from None
    leave_world()
    is_complete = outcome.kind == "finished" or (stop_after or 2**63) <= outcome.state.step
    return EXIT_DONE if is_complete else EXIT_INTERRUPTED


def _clear_error(error: BaseException, run_dir: Path, world: World) -> RunError | None:
    """The error of a full disk, of full memory or of a lost rank; None for anything else."""
    found = capacity_error(error, run_dir, rank=world.rank)
    if found is None and world.num_ranks > 1 and _is_timeout(error):
        found = LostRank(
            f"rank {world.rank} waited for another rank in vain: {one_line(error)}",
            where="resilience",
            hint=silent_ranks(run_dir, world.num_ranks, since=time.time() - _ALIVE_SECONDS),
        )
    elif found is None and world.num_ranks > 1 and _is_lost_connection(error):
        found = LostRank(
            f"rank {world.rank} lost the connection to another rank, which has ended",
            where=str(run_dir),
            hint="the rank that ended first says why",
        )
    return found


def _is_timeout(error: BaseException) -> bool:
    """Whether a collective, or a wait for a key of the store, took longer than the process group allows."""
    text = str(error).lower()
    return _is_lost_connection(error) and ("timed out" in text or "timeout" in text)


def _is_lost_connection(error: BaseException) -> bool:
    """Whether a collective failed because a partner is gone; gloo raises a plain RuntimeError for it."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and "gloo" in str(error).lower()
    )


def on_first_rank(action: Callable[[], None]) -> None:
    """Call on rank 0; an error of it is raised on every rank. Communicates."""
    failure: list[MeshwrightError | None] = [None]
    if dist.get_rank() == 0:
        try:
            action()
        except MeshwrightError as error:
            failure[0] = error
    dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise failure[0]


def lock_directory(run_dir: Path, held: ExitStack) -> None:
    """Make the directory and lock it until `held` ends; removes what interrupted saves left. For rank 0."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        held.enter_context(run_lock(run_dir))
        remove_leftovers(run_dir / "checkpoints")
    except OSError as error:
        raise _not_writable(run_dir, error) from None


def _not_writable(run_dir: Path, error: OSError) -> SpecError:
    is_file = isinstance(error, FileExistsError | NotADirectoryError)
    why = "a file is in the way" if is_file else error.strerror or error
    return SpecError(
        f"the run directory cannot be written: {why}",
        where=str(run_dir),
        hint="name another directory: --dir, or directory= in Python",
    )


@contextmanager
def claimed_directory(run: RunSpec | FitSpec, run_dir: Path) -> Iterator[None]:
    """While inside, the run directory is this run's alone; all ranks call it.

    Refused are a directory that another process trains into, and one that has another run. run.yaml is
    written anew.
    """
    with ExitStack() as held:
        on_first_rank(lambda: _claim(run, run_dir, held))
        yield


def _claim(run: RunSpec | FitSpec, run_dir: Path, held: ExitStack) -> None:
    require_trackers(run.observe)
    lock_directory(run_dir, held)
    run_file = run_dir / "run.yaml"
    if run_file.exists() and (run_dir / "metrics.jsonl").exists():
        _require_same_run(run, run_file)
        if run.checkpoint.upload is None:  # otherwise the checkpoints may be there
            _require_checkpoints(run_dir)
        if _is_finished(run, run_dir):
            return
    draft = run_dir / ".run.yaml"
    try:
        draft.write_text(dump_run(run))
        os.replace(draft, run_file)
    except OSError as error:
        raise _not_writable(run_dir, error) from None


def _require_checkpoints(run_dir: Path) -> None:
    """Refuse to start over, silently, a run whose checkpoints were deleted: its metrics would be lost too."""
    saved = [event for event in read_events(events_path(run_dir, 0)) if event["kind"] == "checkpoint"]
    if saved and not complete_checkpoints(run_dir / "checkpoints"):
        raise CheckpointError(
            f"this run saved a checkpoint of step {saved[-1].get('step')}, and checkpoints/ has none now",
            where=str(run_dir),
            hint="put checkpoints/ back, or start over in another directory (--dir)",
        )


def _require_same_run(run: RunSpec | FitSpec, run_file: Path) -> None:
    try:
        saved = _read_saved(run, run_file)
    except MeshwrightError as error:
        raise CheckpointError(
            f"the run.yaml of this directory cannot be read: {error.fact}",
            where=str(run_file),
            hint="name another directory with --dir",
        ) from None
    allowed_changes(run, saved, run_file.parent)


def _is_finished(run: RunSpec | FitSpec, run_dir: Path) -> bool:
    """Whether the newest checkpoint has all steps: run.yaml then stays as it is. Refuses fewer steps."""
    folders = complete_checkpoints(run_dir / "checkpoints")
    done, wanted = int(folders[-1].name.removeprefix("step-")) if folders else 0, run.schedule.num_steps
    if done > wanted:
        raise CheckpointError(
            f"this run has {done} steps already, schedule.num_steps is {wanted}",
            where=str(run_dir),
            hint=f"set schedule.num_steps above {done} to go on, or name another directory with --dir",
        )
    return done == wanted


def _read_saved(run: RunSpec | FitSpec, run_file: Path) -> dict[str, Any]:
    if isinstance(run, RunSpec):
        return load_run(run_file).model_dump(mode="json")
    found = parse_yaml(read_text(run_file), str(run_file)).value
    return found if isinstance(found, dict) else {}
