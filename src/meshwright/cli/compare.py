"""`meshwright compare`: two runs' losses and gradient norms step by step, and their weights."""

import importlib.util
import math
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from meshwright.observe.compare import Comparison, Difference

_RUN_HELP = "A run directory such as runs/demo, or a run file, which is run first."
MAX_SETTINGS = 20


def compare(
    run_a: Annotated[Path, typer.Argument(metavar="RUN_A", help=_RUN_HELP)],
    run_b: Annotated[Path, typer.Argument(metavar="RUN_B", help=_RUN_HELP)],
    steps: Annotated[
        int | None, typer.Option(min=1, help="Compare only the first N steps; a run file stops there.")
    ] = None,
    assert_equal: Annotated[
        bool,
        typer.Option(
            "--assert-equal", help="Exit with code 4 unless both runs have the same steps and numbers."
        ),
    ] = False,
    rtol: Annotated[
        float, typer.Option(min=0.0, help="Relative difference that still counts as equal; 0 is bit for bit.")
    ] = 0.0,
    weights: Annotated[
        bool, typer.Option(help="Compare the weights at the last step that both have saved.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Compare two runs' losses and gradient norms step by step, and their weights.

    Prints the first step that differs, the largest relative difference, steps that only one of them
    has, and the settings in which the two resolved runs differ. A run file is run first, into a
    directory that is deleted afterwards. Exit codes: 0 compared (equal or not), 2 one of them is not a
    run or they share no step, 4 they differ and --assert-equal was given, or a run failed.
    """
    from meshwright.errors import RunError

    if not math.isfinite(rtol):  # a NaN tolerance would call everything equal
        raise typer.BadParameter(f"{rtol} is not a finite number", param_hint="--rtol")
    with _as_directory(run_a, steps) as dir_a, _as_directory(run_b, steps) as dir_b:
        comparison = _compare(dir_a, dir_b, steps, rtol)
        if weights:
            comparison = _with_weights(comparison, dir_a, dir_b, steps, rtol)
    if as_json:
        typer.echo(_document(comparison, rtol))
    else:
        _print(comparison, run_a, run_b, rtol)
    if assert_equal and not comparison.is_equal:
        raise RunError(f"the runs differ: {_why(comparison)}", where=f"{run_a} and {run_b}")


@contextmanager
def _as_directory(run: Path, steps: int | None) -> Generator[Path]:
    """The run directory itself, or a temporary one into which a run file is run now."""
    if not run.is_file():
        yield run
        return
    from meshwright.errors import RunError
    from meshwright.spec.text import load_run
    from meshwright.train.supervise import run_ranks

    with TemporaryDirectory(prefix="meshwright-compare-") as folder:
        directory = Path(folder) / "run"
        arguments = ["train", str(run), "--dir", str(directory)]
        arguments += ["--stop-after", str(steps)] if steps else []
        code = run_ranks(load_run(run), arguments, directory)
        if code:
            hint = f"`meshwright train {run}` shows it alone"
            raise RunError(f"the run ended with exit code {code}", where=str(run), hint=hint)
        yield directory


def _with_weights(
    comparison: "Comparison", run_a: Path, run_b: Path, steps: int | None, rtol: float
) -> "Comparison":
    if not _checkpoint_names(run_a) & _checkpoint_names(run_b):  # seen without loading torch
        print("weights are not compared: the runs have no checkpoint of the same step", file=sys.stderr)
        return comparison
    if importlib.util.find_spec("torch") is None:
        print("weights are not compared: torch is not installed", file=sys.stderr)
        return comparison
    from meshwright.checkpoint.compare import weight_difference
    from meshwright.observe.compare import Difference

    found = weight_difference(run_a, run_b, max_step=steps, rtol=rtol)
    if found is None:
        print("weights are not compared: the runs have no checkpoint of the same step", file=sys.stderr)
        return comparison
    weights = Difference(
        name=f"weights at step {found.step}",
        num_compared=found.num_tensors,
        num_different=found.num_different,
        first_different=None,
        max_relative=found.max_relative,
        max_relative_at=None,
    )
    return replace(comparison, differences=[*comparison.differences, weights])


def _checkpoint_names(run_dir: Path) -> set[str]:
    return {manifest.parent.name for manifest in run_dir.glob("checkpoints/step-*/manifest.json")}


def _compare(run_a: Path, run_b: Path, steps: int | None, rtol: float) -> "Comparison":
    from meshwright.errors import DataError
    from meshwright.observe.compare import COMPARED, compare_histories, different_settings
    from meshwright.observe.run_files import read_run

    a, b = read_run(run_a, columns=COMPARED), read_run(run_b, columns=COMPARED)
    for files in (a, b):
        if not len(files.history):
            raise DataError("no step is recorded in metrics.jsonl", where=str(files.run_dir))
    comparison = compare_histories(a.history.up_to(steps), b.history.up_to(steps), rtol=rtol)
    if comparison.num_steps == 0:
        spans = " and ".join(f"{files.history.steps[0]} to {files.history.steps[-1]}" for files in (a, b))
        raise DataError(f"the runs share no step: they recorded {spans}", where=f"{run_a} and {run_b}")
    return replace(comparison, settings=different_settings(a.run, b.run))


def _document(comparison: "Comparison", rtol: float) -> str:
    import json

    from meshwright.observe.metrics import json_value

    document = {"equal": comparison.is_equal, "rtol": rtol, **asdict(comparison)}
    document["differences"] = [
        {name: json_value(value) for name, value in difference.items()}
        for difference in document["differences"]
    ]
    return json.dumps(document, indent=2, default=str)


def _print(comparison: "Comparison", run_a: Path, run_b: Path, rtol: float) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    console.print(f"A  {run_a}\nB  {run_b}\n", markup=False)
    console.print(_difference_table(comparison))
    if comparison.settings:
        console.print(_settings_table(comparison.settings))
    tolerance = f"to a relative {rtol:g}" if rtol else "bit for bit"
    verdict = f"equal {tolerance}" if comparison.is_equal else f"different: {_why(comparison)}"
    console.print(f"{comparison.num_steps} shared steps, {verdict}", markup=False)


def _difference_table(comparison: "Comparison") -> Any:
    from rich import box
    from rich.table import Column, Table

    table = Table(Column("", no_wrap=True), box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("compared", "different", "first at step", "largest relative", "at step"):
        table.add_column(heading, justify="right")
    for row in comparison.differences:
        table.add_row(
            row.name,
            str(row.num_compared),
            str(row.num_different),
            _or_dash(row.first_different),
            f"{row.max_relative:.3g}",
            _or_dash(row.max_relative_at),
        )
    return table


def _settings_table(settings: list[tuple[str, Any, Any]]) -> Any:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table("setting", "A", "B", box=box.SIMPLE_HEAD, pad_edge=False)
    for key, in_a, in_b in settings[:MAX_SETTINGS]:
        table.add_row(*(escape(str(cell)) for cell in (key, _or_dash(in_a), _or_dash(in_b))))
    if len(settings) > MAX_SETTINGS:
        table.add_row(f"and {len(settings) - MAX_SETTINGS} more", "", "")
    return table


def _or_dash(value: Any) -> str:
    return "-" if value is None else str(value)


def _from_step(row: "Difference") -> str:
    return "" if row.first_different is None else f" from step {row.first_different}"


def _why(comparison: "Comparison") -> str:
    reasons = [
        f"{row.name}{_from_step(row)}, at most {row.max_relative:.3g} relative"
        for row in comparison.differences
        if row.num_different
    ]
    for name, only in (("A", comparison.only_in_a), ("B", comparison.only_in_b)):
        if only:
            count = f"{len(only)} steps" if len(only) > 1 else "a step"
            reasons.append(f"{count} only in {name} (first {only[0]})")
    return "; ".join(reasons) or "nothing was compared: the steps have no loss and no gradient norm"
