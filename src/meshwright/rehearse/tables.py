"""The reports of rehearsed ranks as tables for a terminal."""

from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from meshwright.hardware.catalogue import Cluster
from meshwright.rehearse.measure import Measured
from meshwright.rehearse.rank_report import RankReport
from meshwright.svg import PALETTE
from meshwright.units import show_bytes, show_seconds

BAR_WIDTH, SMALLEST_BAR_WIDTH = 32, 8
# Columns of the item names and of one rank's bytes, each with the space before the next column.
_NAME_WIDTH, _BYTES_WIDTH = 31, 12


def draw_memory(reports: Sequence[RankReport], cluster: Cluster | None, *, width: int = 80) -> Table:
    """Bytes by item at the peak of each rank, with a bar for the largest, in a terminal of this width."""
    remaining = width - _NAME_WIDTH - _BYTES_WIDTH * len(reports)
    bar_width = max(SMALLEST_BAR_WIDTH, min(BAR_WIDTH, remaining))
    largest = max(report.reserved_bytes for report in reports)
    scale = float(cluster.device.memory_bytes) if cluster else largest
    table = _table("", *(f"rank {report.rank}" for report in reports))
    table.add_column(f"of {show_bytes(scale)}" + ("" if cluster else " reserved"))
    names = dict.fromkeys(name for report in reports for name in report.items)
    for index, name in enumerate(names):
        values = [report.items.get(name, 0.0) for report in reports]
        bar = Text("█" * round(bar_width * max(values) / scale) or "▏", style=PALETTE[index % len(PALETTE)])
        table.add_row(name, *map(show_bytes, values), bar)
    totals = [report.allocated_bytes for report in reports]
    table.add_row("allocated", *map(show_bytes, totals), f"{max(totals) / scale:.0%}", style="bold")
    reserved = [report.reserved_bytes for report in reports]
    table.add_row("reserved", *map(show_bytes, reserved), f"{largest / scale:.0%}", style="bold")
    plain = [report.reserved_default_bytes for report in reports]
    table.add_row("  without expandable segments", *map(show_bytes, plain), f"{max(plain) / scale:.0%}")
    if any(report.host_bytes for report in reports):
        table.add_row("host memory, pinned", *(show_bytes(report.host_bytes) for report in reports))
    return table


def peak_lines(reports: Sequence[RankReport]) -> Iterator[str]:
    """One line per rank: the phase of its peak, its FLOPs, and how it was traced."""
    for report in reports:
        place = ", ".join(f"{axis} {number}" for axis, number in report.coordinates.items() if number)
        how = "full trace" if report.num_traces == 1 else f"from {report.num_traces} truncated traces"
        yield (
            f"rank {report.rank}{f' ({place})' if place else ''}: peak in the {report.peak_phase}; "
            f"{report.flops:.3g} FLOP a step ({how}, {show_seconds(report.seconds)}, {report.form})"
        )


def draw_collectives(reports: Sequence[RankReport]) -> Table:
    """Collectives of each rank in a step: calls and bytes by axis and kind."""
    table = _table("axis", "collective", *(f"rank {report.rank}" for report in reports), left=2)
    kinds = dict.fromkeys((each.axis, each.kind) for report in reports for each in report.collectives)
    for axis, kind in sorted(kinds):
        cells = []
        for report in reports:
            found = [each for each in report.collectives if (each.axis, each.kind) == (axis, kind)]
            cells.append(f"{found[0].count} x, {show_bytes(found[0].num_bytes)}" if found else "")
        table.add_row(axis, kind, *cells)
    if not kinds:
        table.add_row("none", "", *("" for _ in reports))
    return table


def draw_measured(reports: Sequence[RankReport], measured: Sequence[Measured]) -> Table:
    """Measured bytes with the error of the trace, and compute time."""
    table = _table("measured here", *(f"rank {report.rank}" for report in reports))
    pairs = list(zip(reports, measured, strict=True))
    allocated = [_beside(r.allocated_bytes, m.allocated_bytes) for r, m in pairs]
    reserved = [_beside(_reserved(r, m), m.reserved_bytes) for r, m in pairs]
    table.add_row("allocated", *allocated)
    table.add_row("reserved", *reserved)
    table.add_row("compute of a step", *(show_seconds(m.step_seconds) for m in measured))
    table.add_row("  of a micro-batch", *(show_seconds(m.microbatch_seconds) for m in measured))
    return table


def _reserved(report: RankReport, measured: Measured) -> float:
    return report.reserved_bytes if measured.is_expandable else report.reserved_default_bytes


def _beside(traced: float, measured: float) -> str:
    if not measured:
        return "not counted on a CPU"
    return f"{show_bytes(measured)} (traced {traced / measured - 1.0:+.1%})"


def _table(*columns: str, left: int = 1) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < left else "right")
    return table
