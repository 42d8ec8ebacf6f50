"""Charts of collectives and of scaling: bus bandwidth by message, nodes and axis; efficiency by ranks."""

from collections.abc import Sequence
from typing import Any

from meshwright.bench.picture import PREDICTED, chart
from meshwright.units import show_bytes

Row = dict[str, Any]
Lines = dict[str, list[tuple[float, float]]]
_BUS = "bus_gigabytes_per_second"


def comm_charts(rows: Sequence[Row]) -> dict[str, str]:
    """SVG charts by file name: over messages for the largest group or each axis, and over nodes or ranks."""
    measured = [row for row in rows if "error" not in row]
    if not measured:
        return {}
    axes = {row["axis"] for row in measured if "axis" in row}
    if axes:
        return {f"collectives_{axis}": _by_message(_of_axis(measured, axis), axis) for axis in sorted(axes)}
    found = {"collectives": _by_message(measured, "")}
    by_size = _by_size(measured)
    return found | ({"collectives_by_size": by_size} if by_size else {})


def _of_axis(rows: Sequence[Row], axis: str) -> list[Row]:
    return [row for row in rows if row["axis"] == axis]


def _by_message(rows: Sequence[Row], axis: str) -> str:
    most = max(row["ranks"] for row in rows)
    lines = _lines([row for row in rows if row["ranks"] == most], "bytes")
    where = f"the {axis} axis, {most} ranks" if axis else f"{most} ranks"
    title = f"Collectives of {where}: bus bandwidth by message"
    return chart(title, lines, x_name="bytes of the message", y_name="GB/s", is_log=True)


def _by_size(rows: Sequence[Row]) -> str | None:
    """Bus bandwidth of the largest message by number of nodes; by number of ranks on one node."""
    size = max(row["bytes"] for row in rows)
    largest = [row for row in rows if row["bytes"] == size]
    num_nodes = max(row["nodes"] for row in largest)
    x_key = "nodes" if num_nodes > 1 else "ranks"
    if num_nodes > 1:
        per_node = max(row["ranks"] for row in largest if row["nodes"] == num_nodes) // num_nodes
        largest = [row for row in largest if row["ranks"] == per_node * row["nodes"]]
    if len({row[x_key] for row in largest}) < 2:
        return None
    shown = f"{size // 10**6} MB" if size % 10**6 == 0 else show_bytes(size)
    title = f"Messages of {shown}: bus bandwidth by number of {x_key}"
    return chart(title, _lines(largest, x_key), x_name=x_key, y_name="GB/s", is_log=True)


def _lines(rows: Sequence[Row], x_key: str) -> Lines:
    lines: Lines = {}
    for row in rows:
        lines.setdefault(row["kind"], []).append((float(row[x_key]), row[_BUS]))
    return lines


def scaling_chart(rows: Sequence[Row]) -> str:
    """Efficiency by ranks: measured, and dashed what the planner predicts."""
    lines: Lines = {}
    for row in rows:
        for key, prefix in (("efficiency", ""), ("predicted_efficiency", f"{PREDICTED}: ")):
            if key in row:
                name = f"{prefix}{row['kind']} scaling"
                lines.setdefault(name, []).append((float(row["ranks"]), 100 * row[key]))
    title = "Tokens per second and rank, relative to the fewest ranks"
    return chart(title, lines, x_name="ranks", y_name="efficiency in %", is_log=True)
