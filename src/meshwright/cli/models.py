"""`meshwright models`: the model families. Needs no torch."""

import json
from typing import Annotated, Any

import typer

from meshwright.cli.main import new_app

app = new_app(help="List the model families.")


@app.callback()
def _group() -> None:
    """Keep `list` a verb of its own while it is the only one."""


@app.command("list")
def list_models(
    search: Annotated[
        str, typer.Argument(metavar="[TEXT]", help="Only families with this in their name.")
    ] = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")
    ] = False,
) -> None:
    """List the families, which every verb accepts by name.

    A Hugging Face hub id of a family, a config.json, or a folder with one, is accepted wherever a family is.
    """
    from meshwright.errors import SpecError
    from meshwright.spec.families import FAMILIES
    from meshwright.spec.hub_ids import family_of_hub_id

    wanted = family_of_hub_id(search) or search.lower()
    chosen = [model for name, model in FAMILIES.items() if wanted in name]
    if not chosen:
        hint = "`meshwright models list` shows all"
        raise SpecError(f"no family has {search!r} in its name", where="models list", hint=hint)
    rows = [_row(model) for model in chosen]
    typer.echo(json.dumps(rows, indent=2) if as_json else _table(rows))


def _row(model: Any) -> dict[str, Any]:
    from meshwright.spec.parameters import num_active_parameters, num_parameters

    return {
        "family": model.family,
        "parameters": num_parameters(model),
        "active_parameters": num_active_parameters(model),
        "layers": model.num_layers,
        "width": model.width,
        "heads": model.attention.num_heads,
        "kv_heads": model.attention.num_kv_heads,
        "vocab_size": model.vocab_size,
        "max_positions": model.max_positions,
        "kind": _kind(model),
    }


def _kind(model: Any) -> str:
    """The kind of attention and of experts, and other marks of the family."""
    attention, moe = model.attention, model.moe
    grouped = "MHA" if attention.num_kv_heads == attention.num_heads else "GQA"
    parts = ["MLA" if attention.latent else grouped]
    if attention.window:
        parts.append(f"window {attention.window}")
    if attention.qk_norm:
        parts.append("QK-norm")
    if moe:
        parts.append(f"{moe.top_k} of {moe.num_experts} experts" + (" + shared" if moe.shared_width else ""))
    if model.tied_head:
        parts.append("tied head")
    return ", ".join(parts)


def _table(rows: list[dict[str, Any]]) -> str:
    from meshwright.units import show_count

    head = ("family", "parameters", "active", "layers", "width", "heads", "kv", "vocabulary", "positions", "")
    lines: list[tuple[str, ...]] = [head]
    for row in rows:
        active = "" if row["active_parameters"] == row["parameters"] else show_count(row["active_parameters"])
        numbers = (row["layers"], row["width"], row["heads"], row["kv_heads"], row["vocab_size"])
        cells = (show_count(row["parameters"]), active, *map(str, numbers), str(row["max_positions"]))
        lines.append((row["family"], *cells, row["kind"]))
    widths = [max(len(line[column]) for line in lines) for column in range(len(head) - 1)]
    return "\n".join(_aligned(line, widths) for line in lines)


def _aligned(line: tuple[str, ...], widths: list[int]) -> str:
    name = line[0].ljust(widths[0])
    numbers = [cell.rjust(width) for cell, width in zip(line[1:-1], widths[1:], strict=True)]
    return "  ".join((name, *numbers, line[-1])).rstrip()
