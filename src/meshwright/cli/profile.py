"""`meshwright profile`: why a run is as fast as it is, and what would make it faster."""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.cli.check import AsJson, Overrides, Quiet, Run, run_directory
from meshwright.errors import SpecError

if TYPE_CHECKING:
    from meshwright.observe.profile.steps import ProfileSteps
    from meshwright.spec import RunSpec

STEPS_HINT = "three whole numbers: steps without the profiler, its warm-up, recorded steps; such as 6,1,2"
MOST_STEPS = 1000
MOST_RECORDED = 20


def profile(
    run: Run,
    overrides: Overrides = None,
    steps: Annotated[
        str,
        typer.Option(
            metavar="WAIT,WARMUP,ACTIVE", help="Steps without the profiler, its warm-up, recorded steps."
        ),
    ] = "6,1,2",
    out: Annotated[
        Path | None,
        typer.Option("--out", parser=run_directory, metavar="DIR", help="By default runs/<name>/profile."),
    ] = None,
    ranks: Annotated[
        str, typer.Option(metavar="N,N,...", help="Ranks whose traces are kept; `all` keeps every one.")
    ] = "0",
    stacks: Annotated[
        bool, typer.Option(help="Also record a step with the Python stack of every operator.")
    ] = True,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier profile in DIR.")
    ] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Profile the training step of a run file, and say what would make it faster.

    Runs the step of `train` on every rank under torch's profiler, from the run's initial weights; nothing is
    trained or saved. Prints a verdict: share of time on tensor cores and the matmuls that miss them, operator
    classes with FLOPs and arithmetic intensity, exposed communication, launch gaps, wait for data, memory by
    category, and the three changes most worth trying with their overrides. DIR gets profile.json,
    profile.html, and Chrome traces for ui.perfetto.dev. Works on a CPU too.
    """
    from meshwright.launch.launched import launched_rank
    from meshwright.spec.text import read_run

    spec = read_run(run, overrides or []).require_valid()
    parsed = parse_steps(steps, spec, with_stacks=stacks)
    traced = parse_ranks(ranks, spec)
    folder = out or Path("runs") / spec.name / "profile"
    # The profiler's own library prints a line for each start and end.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    if launched_rank() is None:
        _prepare(folder, overwrite=overwrite)
        if spec.parallel.num_ranks > 1:
            _start_ranks(
                run, overrides or [], spec, steps, folder, ranks, stacks=stacks, quiet=quiet, as_json=as_json
            )
    _profile_here(spec, folder, parsed, traced, stacks=stacks, quiet=quiet, as_json=as_json)


def parse_steps(text: str, run: "RunSpec", *, with_stacks: bool) -> "ProfileSteps":
    """The three numbers of --steps; SpecError where they are none, or the run has fewer steps."""
    from meshwright.observe.profile.steps import ProfileSteps

    try:
        wait, warmup, active = (int(part) for part in text.split(","))
    except ValueError:
        raise SpecError(f"--steps {text} is not three numbers", where="--steps", hint=STEPS_HINT) from None
    if wait < 0 or warmup < 1 or not 1 <= active <= MOST_RECORDED or wait + warmup > MOST_STEPS:
        limits = (
            f"WAIT from 0, WARMUP from 1 (together at most {MOST_STEPS}), ACTIVE from 1 to {MOST_RECORDED}"
        )
        raise SpecError(f"--steps {text} cannot be profiled", where="--steps", hint=limits)
    found = ProfileSteps(wait, warmup, active)
    total = found.total(with_stacks=with_stacks)
    if run.schedule.num_steps < total:
        raise SpecError(
            f"the run has {run.schedule.num_steps} steps, and the profile makes {total}",
            where="schedule.num_steps",
            hint=f"add schedule.num_steps={total}, use fewer --steps, or --no-stacks, which saves two",
        )
    return found


def parse_ranks(text: str, run: "RunSpec") -> frozenset[int]:
    """The ranks whose traces are kept."""
    num_ranks = run.parallel.num_ranks
    if text.strip() == "all":
        return frozenset(range(num_ranks))
    try:
        found = frozenset(int(part) for part in text.split(","))
    except ValueError:
        raise SpecError(
            f"--ranks {text} is no list of ranks", where="--ranks", hint="such as 0,3, or all"
        ) from None
    outside = [rank for rank in sorted(found) if not 0 <= rank < num_ranks]
    if outside:
        fact = f"there is no rank {outside[0]}: the run has {num_ranks}"
        raise SpecError(fact, where="--ranks", hint=f"use 0 to {num_ranks - 1}, or all")
    return found


def _prepare(folder: Path, *, overwrite: bool) -> None:
    """Refuse a folder with files; with --overwrite, remove an earlier profile from it."""
    from meshwright.observe.profile.document import PROFILE_FILE

    if folder.exists() and not folder.is_dir():
        raise SpecError("a file is in the way", where=str(folder), hint="name another folder with --out")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    if not (folder / PROFILE_FILE).is_file():
        fact = "the folder has files, and no profile is among them"
        raise SpecError(fact, where=str(folder), hint="name another folder with --out")
    if not overwrite:
        hint = "add --overwrite, or name another folder with --out"
        raise SpecError("the folder has a profile already", where=str(folder), hint=hint)
    shutil.rmtree(folder)


def _start_ranks(
    run: str,
    overrides: list[str],
    spec: "RunSpec",
    steps: str,
    folder: Path,
    ranks: str,
    *,
    stacks: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Start this command once per rank, and end with their exit code."""
    from meshwright.launch.local import run_local

    words = ["profile", run, *overrides, "--steps", steps, "--out", str(folder), "--ranks", ranks]
    words += ["--stacks" if stacks else "--no-stacks"]
    words += ["--quiet"] if quiet else []
    words += ["--json"] if as_json else []
    sys.exit(run_local(words, num_ranks=spec.parallel.num_ranks))


def _profile_here(
    spec: "RunSpec",
    folder: Path,
    steps: "ProfileSteps",
    traced: frozenset[int],
    *,
    stacks: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Profile as one rank; rank 0 prints."""
    from meshwright.cli.train import ended_with_error
    from meshwright.launch.launched import launched_rank
    from meshwright.train.profile_run import profile_rank

    final = spec.with_(data=spec.data.with_(batch_ramp=()))  # the batch of most steps
    try:
        document = profile_rank(final, folder, steps, traced=traced, with_stacks=stacks)
    except BaseException as error:
        if launched_rank() is not None:
            ended_with_error(error)
        raise
    if document is not None:
        _print(document, folder, quiet=quiet, as_json=as_json)


def _print(document: dict[str, Any], folder: Path, *, quiet: bool, as_json: bool) -> None:
    from rich.console import Console

    from meshwright.observe.profile.document import PAGE_FILE
    from meshwright.observe.profile.terminal import print_profile

    if as_json:
        typer.echo(json.dumps(document))
        return
    print_profile(document, Console(soft_wrap=False))
    if not quiet:
        traces = ", ".join(sorted(path.name for path in folder.glob("*-rank*.json.gz")))
        typer.echo(f"wrote {folder / PAGE_FILE} and, for ui.perfetto.dev, {traces}", err=True)
