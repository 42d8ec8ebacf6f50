"""`meshwright bench scaling`: the speed of a run on several numbers of ranks."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli.check import AsJson, On, Overrides, Run

if TYPE_CHECKING:
    from meshwright.spec import RunSpec


def scaling(
    run: Run,
    overrides: Overrides = None,
    ranks: Annotated[
        str,
        typer.Option(metavar="N,N,...", help="Numbers of ranks.", show_default="up to those of the run"),
    ] = "",
    steps: Annotated[int, typer.Option(min=2, help="Steps that are timed, after a warm-up.")] = 10,
    on: On = "",
    as_json: AsJson = False,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Folder of the results, which later launches add to.")
    ] = Path("scaling"),
    yes: Annotated[bool, typer.Option("--yes", help="Start more ranks than cores without asking.")] = False,
) -> None:
    """Strong and weak scaling of a run over data-parallel ranks, on random tokens, beside the prediction.

    Strong scaling keeps the global batch, weak scaling the batch of each rank. Across nodes start the same
    command under a launcher, once for each number of nodes: each launch adds its rows to the folder.
    """
    from meshwright.bench.measurement_report import prepare_folder
    from meshwright.bench.scaling import rank_counts
    from meshwright.launch.launched import launched_rank
    from meshwright.launch.local import run_local
    from meshwright.spec.text import load_run

    spec = load_run(run, overrides or [])
    if launched_rank() is not None:
        _scaling_here(spec, steps, on, output)
        return
    prepare_folder(output)
    for num_ranks in _counts(ranks) or rank_counts(spec):
        require_room(num_ranks, yes=yes)
        words = ["bench", "scaling", run, *(overrides or []), "--steps", str(steps), "-o", str(output)]
        code = run_local([*words, *(["--on", on] if on else [])], num_ranks=num_ranks)
        if code != 0:
            sys.exit(code)
    _show_scaling(output, as_json=as_json)


def _scaling_here(spec: "RunSpec", steps: int, on: str, output: Path) -> None:
    """Measure as one of the ranks; the first one adds the rows to the folder."""
    from meshwright.bench.measurement import Measurement
    from meshwright.bench.scaling import merged, read_rows, scaling_rows
    from meshwright.bench.step import measure_ranks, on_random_tokens
    from meshwright.hardware import cluster_of
    from meshwright.launch.launched import launched_rank
    from meshwright.mesh import choose_device

    def measured(scaled: "RunSpec") -> float:
        with on_random_tokens(scaled) as prepared:
            return measure_ranks(prepared, num_steps=steps)

    launched = launched_rank()
    assert launched is not None
    rows = list(scaling_rows(spec, launched.num_ranks, cluster_of(on) if on else None, measured))
    if launched.rank == 0:
        device = choose_device(spec.device, 0)
        quiet = Measurement("scaling", device, log=lambda text: None, as_json=False, output=output)
        with quiet as bench:
            bench.section("scaling", merged(read_rows(output), rows))


def _show_scaling(folder: Path, *, as_json: bool) -> None:
    from meshwright.bench.measurement_report import log_rows
    from meshwright.bench.scaling import FILE, read_rows

    if as_json:
        typer.echo((folder / FILE).read_text(encoding="utf-8").rstrip())
        return
    log_rows("scaling", read_rows(folder), typer.echo)
    typer.echo(f"written: {folder}", err=True)


def _counts(text: str) -> list[int]:
    """Numbers of ranks in a list such as `1,2,4`."""
    from meshwright.errors import SpecError

    words = [word.strip() for word in text.split(",") if word.strip()]
    if not all(word.isdecimal() and 0 < int(word) <= 1024 for word in words):
        raise SpecError(f"{text!r} is not a list of numbers", where="--ranks", hint="such as 1,2,4")
    return [int(word) for word in words]


def require_room(num_ranks: int, *, yes: bool) -> None:
    """Ask before more ranks are started than there are cores; without a terminal, refuse."""
    from meshwright.errors import SpecError
    from meshwright.hardware.machine import this_machine

    cores = this_machine().cores
    if yes or num_ranks <= max(2, cores):
        return
    memory = f"{num_ranks * 0.4:.0f} GB of memory"
    fact = f"{num_ranks} ranks on {cores} cores take about {memory} and wait for each other"
    if not sys.stdin.isatty():
        raise SpecError(fact, where="--ranks", hint=f"use at most {max(2, cores)}, or add --yes")
    typer.confirm(f"{fact}. Start them?", abort=True, err=True)
