"""The memory of a device by item: a table with bars for a terminal, and SVG."""

from rich.table import Table
from rich.text import Text

from meshwright.plan.draw.charts import Bar, Chart, stacked_bars
from meshwright.plan.search.candidate import Candidate
from meshwright.svg import PALETTE
from meshwright.units import show_bytes

BAR_WIDTH = 32
STAGE_NAMES = {"first": "first stage", "middle": "middle stage", "last": "last stage"}


def stage_items(candidate: Candidate, *, on_host: bool = False) -> dict[str, dict[str, float]]:
    """Bytes by item of the first, a middle and the last pipeline rank; one entry without a pipeline."""
    items_of = candidate.host_items if on_host else candidate.memory_items
    if candidate.run.parallel.pp == 1:
        return {"every rank": items_of["first"]}
    return {STAGE_NAMES[stage]: items for stage, items in items_of.items()}


def memory_table(candidate: Candidate) -> Table:
    """One row per item, with a bar on the scale of the device."""
    stages = stage_items(candidate)
    capacity = float(candidate.question.cluster.device.memory_bytes)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("")
    for stage in stages:
        table.add_column(stage, justify="right")
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
    verdict = "fits" if candidate.fits else "does NOT fit"
    table.add_row(
        "on the device", *map(show_bytes, totals), f"{max(totals) / capacity:.0%}: {verdict}", style="bold"
    )
    host = stage_items(candidate, on_host=True)
    for name in next(iter(host.values())):
        values = [items[name] for items in host.values()]
        if max(values) > 0:
            table.add_row(f"{name}, on the host", *map(show_bytes, values), "")
    return table


def memory_chart(candidate: Candidate) -> Chart:
    """Stacked bars of the first, a middle and the last pipeline rank against the memory of the device."""
    stages = stage_items(candidate)
    totals = {stage: sum(items.values()) for stage, items in stages.items()}
    bars = [
        Bar(stage, {name: value for name, value in items.items() if value > 0}, show_bytes(totals[stage]))
        for stage, items in stages.items()
    ]
    capacity = float(candidate.question.cluster.device.memory_bytes)
    full = max(capacity, *totals.values()) * 1.02
    limit = (capacity, f"device {show_bytes(capacity)}")
    return stacked_bars(bars, full=full, limit=limit, label="Memory per device")
