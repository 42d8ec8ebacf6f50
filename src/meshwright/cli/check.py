"""`meshwright check`: everything that is wrong with a run file, before anything starts."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.cli.completion_values import complete_cluster, complete_run, complete_setting

Run = Annotated[
    str,
    typer.Argument(metavar="RUN", help="A run file, or the name of a recipe.", autocompletion=complete_run),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Overrides of the file, such as parallel.tp=2.",
        autocompletion=complete_setting,
    ),
]
On = Annotated[
    str,
    typer.Option(
        "--on",
        help="leonardo:16 (nodes), h100:8x16 (16 nodes of 8), h100:64, a TOML file, machine.json.",
        autocompletion=complete_cluster,
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr; errors only.")]
PRICED_DEVICE = "h100"
"""The device that wasteful widths are priced on without --on."""
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]


def run_directory(text: str | Path) -> Path:
    """The path of `--dir` (or its default); an empty one, such as of an unset variable, is refused."""
    if not str(text).strip():
        raise typer.BadParameter("the path is empty; name a directory, or leave --dir out")
    return Path(text)


def check(
    run: Run,
    overrides: Overrides = None,
    origins: Annotated[
        bool, typer.Option("--origins", help="Show every value and where it was set.")
    ] = False,
    on: On = "",
    as_json: AsJson = False,
) -> None:
    """List everything that is wrong with a run file, and what in it wastes the hardware.

    Unknown keys, wrong values and broken rules between fields are listed all at once, each with the fact,
    where it is and what to do. What wastes the hardware is a note: the run is valid. A note that a change of
    settings removes says which share of the step it costs. With --on the layout is checked against the
    cluster too: micro-batch, tp across nodes, recompute, ZeRO stage, tiles and waves. Nothing is started and
    nothing is written.
    """
    from meshwright.checkpoint.start_folder import require_start
    from meshwright.cli.data_records import check_records
    from meshwright.errors import EXIT_INPUT, CheckpointError, SpecError
    from meshwright.spec.records_file import has_sources
    from meshwright.spec.text import read_run

    if has_sources(run):
        return check_records(run, as_json=as_json)
    try:
        loaded = read_run(run, overrides or [])
        loaded.require_valid()
        require_start(loaded.run)
    except (SpecError, CheckpointError) as error:
        if not as_json:
            raise
        typer.echo(json.dumps({"valid": False, "violations": _violations(error)}, indent=2))
        raise typer.Exit(EXIT_INPUT) from None
    notes = _advice(loaded.run, on)
    if as_json:
        typer.echo(json.dumps(_document(loaded, notes), indent=2))
    elif origins:
        typer.echo(_origin_table(loaded))
    else:
        typer.echo("\n".join([_summary(loaded.run), *_notes(notes)]))
    return None


def _violations(error: Any) -> list[dict[str, str]]:
    each_error = getattr(error, "violations", [error])
    return [{"fact": each.fact, "where": each.where, "hint": each.hint} for each in each_error]


def _advice(run: Any, on: str) -> list[Any]:
    """Every note on a run, priced on the cluster of --on; a CPU run is priced on this machine."""
    from meshwright.hardware import cluster_of, parse_cluster
    from meshwright.hardware.machine import this_machine
    from meshwright.plan.explain.checklist import advise_cluster
    from meshwright.plan.explain.microbatch import advise_local_microbatch, advise_microbatch
    from meshwright.plan.explain.prices import with_prices
    from meshwright.spec.advice import advise

    found: list[Any] = advise(run)
    if run.device == "cpu" and not on:
        return found + advise_local_microbatch(run, this_machine())
    cluster = cluster_of(on) if on else parse_cluster(f"{PRICED_DEVICE}:{run.parallel.num_ranks}")
    found = with_prices(found, run, cluster)
    return found + (advise_microbatch(run, cluster) + advise_cluster(run, cluster) if on else [])


def _document(loaded: Any, notes: list[Any]) -> dict[str, Any]:
    return {
        "valid": True,
        "violations": [],
        "notes": [
            {"fact": note.fact, "where": note.where, "hint": note.hint, "cost": note.cost} for note in notes
        ],
        "fingerprint": loaded.run.fingerprint(),
        "run": loaded.run.model_dump(mode="json"),
        "origins": {key: str(origin) for key, origin in loaded.origins().items()},
    }


def _summary(run: Any) -> str:
    from meshwright.spec.parameters import num_parameters
    from meshwright.units import show_count

    parallel, data = run.parallel, run.data
    axes = " x ".join(f"{axis}={getattr(parallel, axis)}" for axis in _axes(parallel)) or "one device"
    borrowed = f", ep={parallel.ep} borrowed from dp_shard x cp" if parallel.ep > 1 else ""
    return (
        f"{run.name}: valid, fingerprint {run.fingerprint()}\n"
        f"  model     {run.model.family}: {show_count(num_parameters(run.model))} parameters, "
        f"{run.model.num_layers} layers of width {run.model.width}\n"
        f"{_trained(run)}"
        f"  ranks     {parallel.num_ranks} ({axes}{borrowed})\n"
        f"  batch     {data.batch_sequences} sequences of {data.sequence_length} = "
        f"{show_count(data.batch_tokens)} tokens; {_each_rank(parallel.dp)} takes "
        f"{run.accumulation} x {data.microbatch_sequences}{_ramp(data)}\n"
        f"  schedule  {run.schedule.num_steps} steps, "
        f"{show_count(data.num_sequences(run.schedule.num_steps) * data.sequence_length)} tokens"
        + _data(run)
        + _offloaded(run)
    )


def _trained(run: Any) -> str:
    """What fine-tuning updates, and on which weights; empty where a model is trained from scratch."""
    from meshwright.spec.adapter import num_trained_parameters
    from meshwright.spec.parameters import num_parameters
    from meshwright.units import show_count

    adapter, folder = run.adapter, run.checkpoint.start_from
    start = f"from {folder}{_absence(folder)}" if folder else _NO_BASE
    if adapter is None and not run.train_only:
        return f"  weights   {start}\n" if folder else ""
    count = num_trained_parameters(run.model, adapter, run.train_only)
    share = f"{show_count(count)} parameters, {count / num_parameters(run.model):.2%} of the model"
    if adapter is None:
        return f"  trained   {share}: {', '.join(run.train_only)}\n  weights   {start}\n"
    form = run.precision.weights if adapter.base == "weights" else adapter.base
    beside = f", and {', '.join(run.train_only)}" if run.train_only else ""
    there = adapter.start_from
    onward = f", from {there}{_absence(there)}" if there else ""
    kind = f"{adapter.kind} of rank {adapter.rank} on {', '.join(adapter.targets)}{beside}{onward}"
    return f"  trained   {share}: {kind}\n  base      {form}, {start}\n"


_NO_BASE = "no weights yet: `train` needs checkpoint.start_from"


def _absence(folder: str) -> str:
    """What to add to the name of a folder that is not on this machine."""
    return "" if Path(folder).expanduser().exists() else ", which is not there"


def _each_rank(dp: int) -> str:
    return "the one rank" if dp == 1 else f"each of {dp} data-parallel ranks"


def _data(run: Any) -> str:
    """What the datasets resolve to; empty for the generated corpus."""
    from meshwright.data.stream_report import report_stream
    from meshwright.data.tokenize import has_other_tokenizer
    from meshwright.errors import DataError

    if run.data.path is None and not run.data.blend:
        return ""
    try:
        lines = [report.line for report in report_stream(run)]
    except DataError as error:
        lines = [f"{error.where}: {error.fact}"]
    folder = run.checkpoint.start_from
    if folder and has_other_tokenizer(run.data, Path(folder).expanduser()):
        lines.append(f"packed with another tokenizer than that of {folder}")
    return "\n  data      " + "\n            ".join(lines)


def _ramp(data: Any) -> str:
    parts = "".join(f", {part.batch_sequences} before step {part.before_step}" for part in data.batch_ramp)
    return f"\n  ramp      sequences{parts[1:]}" if parts else ""


def _offloaded(run: Any) -> str:
    """Host memory that offload needs; empty without offload."""
    from meshwright.plan.predict import host_bytes
    from meshwright.units import show_bytes

    if not run.memory.offload:
        return ""
    needed = show_bytes(host_bytes(run))
    return f"\n  offload   {', '.join(run.memory.offload)}: at most {needed} of host memory per rank"


def _notes(notes: list[Any]) -> list[str]:
    return [f"\nnote: {note.fact}\n  where: {note.where}\n  hint:  {note.hint}" for note in notes]


def _axes(parallel: Any) -> list[str]:
    from meshwright.spec.parallel import MESH_ORDER

    return [axis for axis in MESH_ORDER if getattr(parallel, axis) > 1]


def _origin_table(loaded: Any) -> str:
    from meshwright.spec.violations import show_value
    from meshwright.spec.yaml_text import walk

    values = {".".join(map(str, path)): value for path, value in walk(loaded.run.model_dump(mode="json"))}
    rows = [(key, show_value(values[key]), str(origin)) for key, origin in loaded.origins().items()]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(f"{key:<{widths[0]}}  {value:<{widths[1]}}  {origin}" for key, value, origin in rows)
