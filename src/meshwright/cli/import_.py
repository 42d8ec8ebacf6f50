"""`meshwright import`: a config file of another framework as a run file."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.cli.check import AsJson, Overrides


def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The config file.")],
    overrides: Overrides = None,
    form: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="FORMAT",
            help="accelerate, deepspeed, torchtitan or megatron.",
            show_default="by the file's ending",
        ),
    ] = None,
    onto: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="A run file or recipe for what the file does not say."),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Number of ranks.", show_default="as in the file, or in --onto")
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(min=1, help="Number of nodes, for hybrid sharding.", show_default="as in the file"),
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the run file here.")] = None,
    skip_refused: Annotated[
        bool, typer.Option("--skip-refused", help="Write the run without the keys that are refused.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Read a config file of Accelerate, DeepSpeed, torchtitan or Megatron-LM into a run file.

    Every key is reported as mapped, changed (it means something else here, or needs no setting) or
    refused, with the reason. With a refused key nothing is written, unless --skip-refused is given. Model,
    data and schedule are rarely in such files: take them from a run (--onto) or set them with KEY=VALUE.
    """
    from meshwright.configs.entries import require_complete, show_entries
    from meshwright.configs.read import base_run, imported_run, read_config

    imported = read_config(file, form, base=base_run(onto), num_ranks=ranks, num_nodes=nodes)
    if not as_json:
        typer.echo(show_entries(imported.entries), err=output is None)
    if not skip_refused:
        _require_complete(imported, file, require_complete, as_json=as_json)
    run = imported_run(imported, overrides or [], onto=onto, place=str(file))
    text = _file_text(imported, run, file)
    if output is not None:
        output.write_text(text, encoding="utf-8")
        typer.echo(f"written: {output}", err=True)
    if as_json:
        typer.echo(json.dumps({**_document(imported), "run": run.model_dump(mode="json")}, indent=2))
    elif output is None:
        typer.echo(text, nl=False)


def _require_complete(imported: Any, file: Path, require: Any, *, as_json: bool) -> None:
    """Refuse a file with refused keys; with --json the document has them all."""
    if as_json and any(entry.is_blocking for entry in imported.entries):
        from meshwright.errors import EXIT_INPUT

        typer.echo(json.dumps({**_document(imported), "run": None}, indent=2))
        raise typer.Exit(EXIT_INPUT)
    require(imported.entries, where=str(file))


def _document(imported: Any) -> dict[str, Any]:
    return {
        "format": imported.form,
        "keys": [entry.document() for entry in imported.entries],
        "settings": imported.settings,
    }


def _file_text(imported: Any, run: Any, file: Path) -> str:
    """The run file, with the keys that are not the same here as comments."""
    from meshwright.configs.entries import show_entries
    from meshwright.spec.text import dump_run

    others = [entry for entry in imported.entries if entry.status != "mapped"]
    lines = show_entries(others).splitlines()[:-1] if others else []
    comments = [
        f"# Imported from {file.name} ({imported.form}). Keys that differ here:",
        *(f"#   {x}" for x in lines),
    ]
    return "\n".join([*(comments if others else comments[:0]), dump_run(run)])
