"""`meshwright export`: a run file as a config file of another framework."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.cli.check import AsJson, Overrides, Run

TARGETS = ("accelerate", "deepspeed")


def export(
    run: Run,
    overrides: Overrides = None,
    to: Annotated[
        str,
        typer.Option("--to", metavar="FORMAT", help="accelerate (YAML, FSDP 2 or DDP) or deepspeed (JSON)."),
    ] = "accelerate",
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes in an Accelerate file.")] = 1,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the config file here.")] = None,
    skip_refused: Annotated[
        bool,
        typer.Option("--skip-refused", help="Write the file without the parts of the layout it cannot say."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write the layout of a run as an Accelerate or DeepSpeed file.

    Every value of the run is reported as mapped, changed or refused, with the reason. Model, data and other
    values that a script sets in those frameworks are refused and do not stop the export; a part of the
    layout (parallel, precision, memory) that cannot be said does, unless --skip-refused is given.
    """
    from meshwright.configs.entries import require_complete, show_entries
    from meshwright.spec.text import load_run

    exported = _exported(load_run(run, overrides or []), to, nodes)
    is_complete = skip_refused or not any(entry.is_blocking for entry in exported.entries)
    if as_json:
        keys = [entry.document() for entry in exported.entries]
        typer.echo(
            json.dumps({"format": to, "keys": keys, "file": exported.document if is_complete else None})
        )
    else:
        typer.echo(show_entries(exported.entries), err=output is None)
    if not is_complete:
        require_complete(exported.entries, where=run)
    text = config_text(exported.document, to)
    if output is not None:
        output.write_text(text, encoding="utf-8")
        typer.echo(f"written: {output}", err=True)
    elif not as_json:
        typer.echo(text, nl=False)


def _exported(run: Any, to: str, nodes: int) -> Any:
    from meshwright.configs.export_accelerate import export_accelerate
    from meshwright.configs.export_deepspeed import export_deepspeed
    from meshwright.errors import SpecError

    if to not in TARGETS:
        raise SpecError(f"there is no format {to!r} to export to", where="--to", hint=" or ".join(TARGETS))
    return export_accelerate(run, num_nodes=nodes) if to == "accelerate" else export_deepspeed(run)


def config_text(document: dict[str, Any], to: str) -> str:
    """The text of a config file."""
    from meshwright.spec.yaml_text import dump_json, dump_yaml

    return dump_yaml(document) if to == "accelerate" else dump_json(document)
