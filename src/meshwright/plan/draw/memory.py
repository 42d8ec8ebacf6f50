"""Pictures of what fills a device: bars for a terminal, SVG for everything else."""

from rich.table import Table
from rich.text import Text

from meshwright.plan.draw.charts import PALETTE
from meshwright.plan.draw.plan_report import memory_chart
from meshwright.plan.search.decision import Candidate
from meshwright.units import show_bytes

BAR_WIDTH = 32
STAGE_WORDS = {"first": "first stage", "middle": "middle stage", "last": "last stage"}
SVG_STYLE = (
    "<style>text{font:13px -apple-system,'Segoe UI','Helvetica Neue',Arial,sans-serif;fill:#1c2733}"
    "text.small{font-size:12px;fill:#56636f}text.strong{font-weight:600}"
    ".limit{stroke:#c0392b;stroke-width:1.5;stroke-dasharray:4 3}</style>"
)


def shown_stages(candidate: Candidate, *, on_host: bool = False) -> dict[str, dict[str, float]]:
    """Items by the words of the stage; one entry without a pipeline."""
    items_of = candidate.host_items if on_host else candidate.memory_items
    if candidate.run.parallel.pp == 1:
        return {"every rank": items_of["first"]}
    return {STAGE_WORDS[stage]: items for stage, items in items_of.items()}


def draw_memory_text(candidate: Candidate) -> Table:
    """One row per item, with a bar on the scale of the device."""
    stages = shown_stages(candidate)
    capacity = float(candidate.question.cluster.device.memory_bytes)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("")
    for words in stages:
        table.add_column(words, justify="right")
    table.add_column(f"of {show_bytes(capacity)}")
    names = list(next(iter(stages.values())))
    for index, name in enumerate(names):
        values = [items[name] for items in stages.values()]
        if max(values) > 0:
            bar = Text(
                "█" * round(BAR_WIDTH * max(values) / capacity) or "▏", style=PALETTE[index % len(PALETTE)]
            )
            table.add_row(name, *map(show_bytes, values), bar)
    totals = [sum(items.values()) for items in stages.values()]
    verdict = "fits" if candidate.may_fit else "does NOT fit"
    table.add_row(
        "on the device", *map(show_bytes, totals), f"{max(totals) / capacity:.0%}: {verdict}", style="bold"
    )
    host = shown_stages(candidate, on_host=True)
    for name in next(iter(host.values())):
        values = [items[name] for items in host.values()]
        if max(values) > 0:
            table.add_row(f"{name}, on the host", *map(show_bytes, values), "")
    return table


def draw_memory_svg(candidate: Candidate) -> str:
    """The bars of the report as a file of their own."""
    chart = memory_chart(candidate)
    return (
        chart.replace("<svg ", "<svg xmlns='http://www.w3.org/2000/svg' ", 1).replace(">", f">{SVG_STYLE}", 1)
        + "\n"
    )
