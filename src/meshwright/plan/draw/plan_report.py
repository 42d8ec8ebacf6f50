"""A plan as one self-contained HTML file: inline charts, no scripts, nothing fetched."""

from collections.abc import Sequence
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined

import meshwright
from meshwright import svg
from meshwright.plan.draw.charts import Axis, Bar, Line, line_chart, stacked_bars
from meshwright.plan.draw.document import compute_optimal, format_text, rank_map
from meshwright.plan.draw.memory import memory_chart
from meshwright.plan.draw.schedule import inline_svg, picture
from meshwright.plan.explain.gains import Gain
from meshwright.plan.explain.neighbours import ITEM_NAMES, Neighbour
from meshwright.plan.search.candidate import Candidate, layout_text
from meshwright.plan.search.decision import Plan
from meshwright.plan.search.sizing import ScalingPoint, scaling_counts, strong_scaling, weak_scaling
from meshwright.plan.workload.schedules import PipelineShape
from meshwright.spec.run import RunSpec
from meshwright.units import show_bytes, show_count, show_number, show_seconds

PRICES_SHOWN = (1.0, 2.0, 4.0)
BUDGETS_SHOWN = (0.1, 0.5, 1.0, 2.0, 10.0)
MOST_ACTIONS_DRAWN = 700


def report_html(
    plan: Plan,
    *,
    tokens: int,
    why: list[str],
    neighbours: Sequence[Neighbour],
    gains: Sequence[Gain] = (),
    price: float | None = None,
) -> str:
    """The report; scaling curves are searched for here, which takes about a second per size."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    source = (
        resources.files("meshwright.plan.draw").joinpath("plan_report.html.j2").read_text(encoding="utf-8")
    )
    best, cluster = plan.best, plan.question.cluster
    return environment.from_string(source).render(
        title=f"{best.run.model.family} on {best.num_ranks} x {cluster.device.title}",
        subtitle=_subtitle(plan, tokens),
        cards=_cards(best, tokens),
        layout=layout_text(best.run),
        why=why,
        svg_style=svg.style_sheet(),
        memory_chart=memory_chart(best).inline(),
        memory_note=_memory_note(best),
        step_chart=_step_chart(plan),
        step_note=_step_note(best),
        timeline=_timeline(best.run),
        scaling_chart=_scaling_chart(plan),
        prices=[f"{each:g}" for each in _prices(price)],
        budgets=_budgets(best, tokens, price),
        budget_note=_budget_note(plan, tokens),
        alternatives=[_row(candidate, tokens) for candidate in plan.top],
        neighbours=neighbours,
        gains=[gain.text for gain in gains],
        rank_map=rank_map(best.run.parallel, cluster.devices_per_node),
        footer=f"meshwright {meshwright.__version__}, fingerprint {best.run.fingerprint()}",
    )


def _subtitle(plan: Plan, tokens: int) -> str:
    data, found = plan.question.run.data, plan.result
    return (
        f"{show_count(tokens)} tokens in batches of {show_count(data.batch_tokens)} "
        f"({data.batch_sequences} sequences of {data.sequence_length}), "
        f"{format_text(plan.question.run)}. "
        f"{found.num_considered:,} layouts priced, {found.num_fitting:,} fit."
    )


def _cards(best: Candidate, tokens: int) -> list[dict[str, str]]:
    low, high = best.interval_seconds
    per_device = best.tokens_per_second / best.num_ranks
    memory = best.question.cluster.device.memory_bytes
    values = (
        ("step", show_seconds(best.step_seconds), f"{show_seconds(low)} to {show_seconds(high)}"),
        ("tokens per second", show_count(best.tokens_per_second), f"{per_device:,.0f} per device"),
        ("MFU", f"{best.mfu:.1%}", "of the dense data-sheet peak"),
        ("memory", show_bytes(best.device_bytes), f"of {show_bytes(memory)} per device"),
        ("duration", f"{_days(best.days(tokens))} days", "without interruptions"),
        (
            "device-hours",
            show_count(best.device_hours(tokens)),
            f"on {show_number(best.num_ranks, 'device')}",
        ),
    )
    return [{"name": name, "value": value, "note": note} for name, value, note in values]


def _memory_note(best: Candidate) -> str:
    budget = show_bytes(best.question.memory_budget_bytes)
    return (
        f"Peak of the step: {show_bytes(best.allocated_bytes)} allocated by tensors, "
        f"{show_bytes(best.reserved_bytes)} reserved by the allocator, "
        f"{show_bytes(best.device_bytes)} on the device with context and communicators. "
        f"A plan may use up to {budget}."
        + (f" Allocated memory is {margin.words}." if (margin := best.memory_margin) else "")
    )


def _step_chart(plan: Plan) -> str:
    shown = plan.top[:4]
    bars = [
        Bar(f"layout {number}", _named_seconds(candidate), show_seconds(candidate.step_seconds))
        for number, candidate in enumerate(shown, start=1)
    ]
    full = max(candidate.step_seconds for candidate in shown) * 1.02
    return stacked_bars(bars, full=full, label="Step time by item").inline()


def _named_seconds(candidate: Candidate) -> dict[str, float]:
    return {
        ITEM_NAMES.get(name, name): seconds
        for name, seconds in candidate.seconds_items.items()
        if seconds > 0
    }


def _step_note(best: Candidate) -> str:
    largest = sorted(_named_seconds(best).items(), key=lambda item: -item[1])[:4]
    parts = ", ".join(f"{name} {seconds / best.step_seconds:.0%}" for name, seconds in largest)
    return f"Layout 1 is the plan; the others are the next best in the table below. Largest parts: {parts}."


def _timeline(run: RunSpec) -> str:
    parallel = run.parallel
    if parallel.pp == 1:
        return ""
    # A long step is periodic: a few rounds of micro-batches are enough.
    drawn = min(run.accumulation, 4 * parallel.pp)
    shape = PipelineShape(parallel.pp, parallel.virtual_stages, drawn)
    if shape.num_stages * drawn > MOST_ACTIONS_DRAWN:
        return ""
    return inline_svg(picture(parallel.schedule, shape))


def _scaling_chart(plan: Plan) -> str:
    counts = scaling_counts(plan)
    strong, weak = strong_scaling(plan, counts), weak_scaling(plan, counts)
    if len(strong) < 2:
        return ""
    first = strong[0]
    ideal = [
        (float(count), first.tokens_per_second / first.num_devices)
        for count in (first.num_devices, strong[-1].num_devices)
    ]
    lines = [
        Line("strong", _points(strong), svg.PALETTE[0], has_dots=True),
        Line("weak", _points(weak), svg.PALETTE[2], has_dots=True),
        Line("no loss", ideal, "faint", is_dashed=True),
    ]
    drawn = [line for line in lines if len(line.points) > 1]
    x, y = Axis("devices", "{:,.0f}".format, is_log=True), Axis("tokens per second and device", show_count)
    return line_chart(drawn, x=x, y=y).inline()


def _points(points: list[ScalingPoint]) -> list[tuple[float, float]]:
    return [(float(point.num_devices), point.tokens_per_second / point.num_devices) for point in points]


def _prices(price: float | None) -> tuple[float, ...]:
    return (price,) if price is not None else PRICES_SHOWN


def _budgets(best: Candidate, tokens: int, price: float | None) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for factor in BUDGETS_SHOWN:
        count = int(tokens * factor)
        hours = best.device_hours(count)
        rows.append(
            {
                "tokens": show_count(count),
                "asked": factor == 1.0,
                "days": _days(best.days(count)),
                "hours": f"{hours:,.0f}",
                "costs": [f"{hours * each:,.0f}" for each in _prices(price)],
            }
        )
    return rows


def _budget_note(plan: Plan, tokens: int) -> str:
    flops = plan.question.workload.model_flops_per_token * tokens
    size, optimal_tokens = compute_optimal(flops)
    work = f"The run in bold does {flops:.2e} model FLOPs."
    if plan.question.from_trained:
        return work
    return (
        f"{work} Spent compute-optimally "
        f"(20 tokens per parameter) they would train {show_count(size)} parameters "
        f"on {show_count(optimal_tokens)} tokens."
    )


def _row(candidate: Candidate, tokens: int) -> dict[str, str]:
    return {
        "layout": layout_text(candidate.run),
        "devices": f"{candidate.num_ranks:,}",
        "step": show_seconds(candidate.step_seconds),
        "mfu": f"{candidate.mfu:.1%}",
        "memory": show_bytes(candidate.device_bytes),
        "days": _days(candidate.days(tokens)),
    }


def _days(days: float) -> str:
    """Days with three digits, never with an exponent."""
    return f"{days:,.0f}" if days >= 100 else f"{days:.3g}"
