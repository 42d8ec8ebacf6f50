"""`meshwright train`: run a run file here, with as many ranks as it asks for."""

import importlib
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from meshwright.cli.check import AsJson, Overrides, Quiet, Run, run_directory
from meshwright.errors import EXIT_RANK_LOST, EXIT_RANK_OUT_OF_MEMORY, LostRank, OutOfMemory, SpecError

if TYPE_CHECKING:
    from meshwright.launch.rank_process import Program
    from meshwright.spec import RunSpec


def train(
    run: Run,
    overrides: Overrides = None,
    directory: Annotated[
        Path | None,
        typer.Option("--dir", parser=run_directory, metavar="DIR", help="By default runs/<name>."),
    ] = None,
    stop_after: Annotated[
        int | None,
        typer.Option(
            metavar="STEP", min=1, help="Save and stop at this step; the same command without it resumes."
        ),
    ] = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Run a run file: starts local ranks, or joins those that a launcher started.

    The run directory gets run.yaml, metrics.jsonl, events, and checkpoints. Started again with the same
    directory, a run resumes from its newest checkpoint; other settings hold from there on, and what its
    checkpoints fix is refused. Ctrl-C saves and stops (exit 130). Several ranks are restarted after a crash,
    a kill or a hang; exit 93 when restarts bring no newer checkpoint. --json prints summary.json at the end.
    """
    from meshwright.launch.launched import launched_rank
    from meshwright.launch.launched_node import launched_node
    from meshwright.spec.conditions import has_watched_ranks
    from meshwright.spec.text import read_run

    loaded = read_run(run, overrides or [])
    loaded.require_valid()
    spec = loaded.run
    run_dir = directory or Path("runs") / spec.name
    is_rank = launched_rank() is not None
    if not is_rank and not quiet:
        _print_notes(spec)
    if is_rank:
        _run_one_rank(spec, run_dir, stop_after, quiet=quiet)
    if has_watched_ranks(spec) or launched_node():
        from meshwright.train.supervise import run_ranks

        arguments = ["train", run, *(overrides or []), "--dir", str(run_dir)]
        arguments += ["--stop-after", str(stop_after)] if stop_after else []
        arguments += ["--quiet"] if quiet else []
        program = _forkable_program(spec)
        _end(run_ranks(spec, arguments, run_dir, program=program), run_dir, as_json=as_json)
    from meshwright.train.session import run_rank

    _end(run_rank(spec, run_dir, stop_after=stop_after, quiet=quiet), run_dir, as_json=as_json)


def _end(code: int, run_dir: Path, *, as_json: bool) -> NoReturn:
    """End with this exit code; with `--json` after the summary of the run, where it has one."""
    from meshwright.observe.summary import read_summary

    if as_json:
        typer.echo(json.dumps({"directory": str(run_dir), **read_summary(run_dir)}, indent=2))
    sys.exit(code)


def _forkable_program(run: "RunSpec") -> "Program | None":
    """What ranks run that are forked from this process, once it has imported torch for all of them.

    A restart then takes no import. None where torch was imported before: something may have used it.
    """
    if sys.platform != "linux" or "torch" in sys.modules:
        return None
    from meshwright.cli.main import run as run_command
    from meshwright.launch.launched_node import launched_node
    from meshwright.launch.local import THREADS, default_threads

    node = launched_node()
    num_here = node.num_local_ranks(run.parallel.num_ranks) if node else run.parallel.num_ranks
    os.environ.setdefault(THREADS, default_threads(num_here))  # read by torch when it is imported
    importlib.import_module("meshwright.train.session")
    return run_command


def _print_notes(run: "RunSpec") -> None:
    """Print where a family was shrunk by half; `check` prints every note."""
    from meshwright.spec.advice import family_keeps_its_proportions

    for note in family_keeps_its_proportions(run):
        print(f"note: {note.fact}\n  hint:  {note.hint}", file=sys.stderr)


def _run_one_rank(run: "RunSpec", run_dir: Path, stop_after: int | None, *, quiet: bool) -> NoReturn:
    """Train as one of the processes that a launcher started; after an error this one ends at once."""
    from meshwright.launch.parent import end_with_parent
    from meshwright.launch.stacks import write_stacks_on_signal

    end_with_parent()
    write_stacks_on_signal()
    from meshwright.train.session import run_rank

    try:
        _require_own_ranks(run)
        sys.exit(run_rank(run, run_dir, stop_after=stop_after, quiet=quiet))
    except SystemExit:
        raise
    except BaseException as error:
        ended_with_error(error)


def ended_with_error(error: BaseException) -> NoReturn:
    """Print the error of a rank and end its process at once."""
    from meshwright.cli.main import report_error
    from meshwright.launch.launched import is_supervised

    code = report_error(error)
    if isinstance(error, OutOfMemory):
        code = EXIT_RANK_OUT_OF_MEMORY
    elif isinstance(error, LostRank) and is_supervised():
        code = EXIT_RANK_LOST
    sys.stdout.flush()
    sys.stderr.flush()
    # A usual exit frees the process groups, and that waits for collectives which will never complete.
    os._exit(code)


def _require_own_ranks(run: "RunSpec") -> None:
    """Refuse `on_oom=halve_microbatch`, which has no effect where another launcher has started the ranks."""
    from meshwright.launch.launched import is_local_rank

    if run.memory.on_oom == "halve_microbatch" and not is_local_rank():
        raise SpecError(
            "on_oom=halve_microbatch restarts the ranks, and another launcher has started these",
            where="memory.on_oom",
            hint="set memory.on_oom=stop; after an OOM start again with a smaller data.microbatch_sequences: "
            "the run resumes from its newest checkpoint. Or let `meshwright train` start the ranks",
        )
