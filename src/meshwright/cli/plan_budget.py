"""`meshwright plan --budget`: sizes and tokens that a budget trains, with the loss expected of each."""

import json
from typing import Any

import typer

_EXPLAINED = (
    "tokens: what the size's own predicted speed trains in that time; inference: FLOPs per token against the",
    "size with the lowest loss. A smaller model that is trained for longer costs less to serve.",
    "Losses are those of Chinchilla's data and tokenizer: compare them with each other only.",
)


def plan_budget(
    model: str, budget: str, *, on: str, precision: str, price: float | None, as_json: bool
) -> None:
    """Print the table of alternatives."""
    from meshwright.errors import SpecError
    from meshwright.hardware import cluster_of
    from meshwright.plan.budget import alternatives, budget_hours
    from meshwright.spec.huggingface import load_model

    if not on:
        raise SpecError(
            "no cluster is given", where="--on", hint="such as --on h100:8x16 or --on leonardo:16"
        )
    cluster, template = cluster_of(on), load_model(model)
    if template.moe is not None or template.attention.latent is not None:
        raise SpecError(
            f"{template.family} has routed experts or latent attention; the law holds for dense decoders",
            where="MODEL",
            hint="name a dense family, such as llama-3.1-8b",
        )
    hours = budget_hours(budget, cluster, price)
    found = alternatives(template, cluster, hours, precision)
    if as_json:
        typer.echo(json.dumps(_document(found, hours, cluster), indent=2))
        return
    typer.echo(_text(found, template.family, hours, cluster))


def _document(found: list[Any], hours: float, cluster: Any) -> dict[str, Any]:
    from meshwright.plan.scaling_law import SOURCE

    rows = [
        {
            "parameters": one.num_parameters,
            "num_layers": one.model.num_layers,
            "width": one.model.width,
            "tokens": one.tokens,
            "tokens_per_second": one.tokens_per_second,
            "mfu": one.mfu,
            "layout": one.layout,
            "expected_loss": one.expected_loss,
        }
        for one in found
    ]
    device_hours = hours * cluster.num_devices
    return {"hours": hours, "device_hours": device_hours, "source": SOURCE, "alternatives": rows}


def _text(found: list[Any], family: str, hours: float, cluster: Any) -> str:
    from meshwright.plan.scaling_law import SOURCE
    from meshwright.units import show_count, show_seconds

    best = min(found, key=lambda one: one.expected_loss)
    lines = [
        f"{show_seconds(3600 * hours)} on {cluster.num_devices} x {cluster.device.title} "
        f"({show_count(hours * cluster.num_devices)} device-hours), proportions of {family}",
        "",
        f"{'parameters':>10}  {'layers x width':>14}  {'tokens':>7}  {'per parameter':>13}  {'MFU':>5}  "
        f"{'expected loss':>13}  {'inference':>9}  layout",
    ]
    for one in found:
        shape = f"{one.model.num_layers} x {one.model.width}"
        ratio, inference = one.tokens / one.num_parameters, one.num_parameters / best.num_parameters
        mark = "  <- lowest loss" if one is best else ""
        sizes = f"{show_count(one.num_parameters):>10}  {shape:>14}  {show_count(one.tokens):>7}"
        figures = f"{ratio:>13,.0f}  {one.mfu:>5.0%}  {one.expected_loss:>13.3f}  {inference:>8.2f}x"
        lines.append(f"{sizes}  {figures}  {one.layout}{mark}")
    return "\n".join([*lines, "", *_EXPLAINED, f"law: {SOURCE}"])
