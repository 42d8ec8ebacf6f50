"""`meshwright plan --verify N`: traces the best layouts before one of them is the answer. Needs torch."""

import time
from typing import Any

import typer


def verify(found: Any, count: int) -> tuple[Any, dict[str, Any]]:
    """The plan without layouts whose trace does not fit, and the document of what was traced."""
    from meshwright.plan.search.verified import TracedLayout, order_text, verified_plan
    from meshwright.rehearse.traced_peaks import traced_peaks

    candidates = found.top[:count]
    started_at = time.monotonic()
    typer.echo(f"tracing {len(candidates)} layouts", err=True)
    peaks = traced_peaks([each.run for each in candidates], log=_log)
    traced = [
        TracedLayout(candidate, peak.allocated_bytes)
        for candidate, peak in zip(candidates, peaks, strict=True)
    ]
    plan = verified_plan(found, traced)
    document = {
        "seconds": time.monotonic() - started_at,
        "order": order_text(plan, traced),
        "layouts": [_layout(each) for each in traced],
    }
    return plan, document


def _layout(each: Any) -> dict[str, Any]:
    from meshwright.plan.search.candidate import layout_text

    return {
        "layout": layout_text(each.candidate.run),
        "predicted_bytes": each.predicted_bytes,
        "traced_bytes": each.traced_bytes,
        "device_bytes": each.device_bytes,
        "fits": each.fits,
    }


def verified_lines(document: dict[str, Any]) -> list[str]:
    """The layouts with predicted and traced bytes, one line each, and what became of the order."""
    from meshwright.units import show_bytes, show_seconds

    lines = [f"   {'predicted':>10}  {'traced':>10}  {'error':>7}  {'on the device':>14}  fits  layout"]
    for number, each in enumerate(document["layouts"], start=1):
        error = each["predicted_bytes"] / each["traced_bytes"] - 1.0
        sizes = f"{show_bytes(each['predicted_bytes']):>10}  {show_bytes(each['traced_bytes']):>10}"
        fits = f"{'yes' if each['fits'] else 'NO':<4}  {each['layout']}"
        lines.append(f"{number:<3}{sizes}  {error:>+7.2%}  {show_bytes(each['device_bytes']):>14}  {fits}")
    lines.append("predicted and traced: allocated bytes without compilation")
    return [*lines, f"{document['order']} (traced in {show_seconds(document['seconds'])})"]


def _log(line: str) -> None:
    typer.echo(f"  {line}", err=True)
