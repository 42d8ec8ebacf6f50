"""A profile document on a terminal."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from meshwright.units import show_bytes, show_count, show_seconds

BAR_CELLS = 24
BASES = {"measured": "from the trace", "predicted": "predicted", "bound": "an upper bound is known only"}
_MOST_TOP = 8
_NAME_WIDTH = 64


def print_profile(document: Mapping[str, Any], console: Console) -> None:
    """Print the verdict, the changes worth trying, and the tables."""
    title = f"{document['run']} on {document['num_ranks']} x {document['device']}, torch {document['torch']}"
    console.print(Text(title, style="bold"))
    for sentence in (f"{rates_line(document)}.", *document["verdict"]):
        console.print(_indented(sentence, 2))
    _print_changes(document, console)
    console.print(_breakdown(document))
    console.print(_classes(document))
    if document["missed"]:
        console.print(_missed(document))
    console.print(_top(document))
    if document["memory"]:
        console.print(_memory(document))
    if len(document["ranks"]) > 1:
        console.print(_ranks(document))


def gain_text(change: Mapping[str, Any]) -> str:
    """`23% (18% to 27%, from the trace)`: the expected gain of a change and its bounds."""
    if change["basis"] == "bound":
        return f"at most {change['high']:.0%}"
    return f"{change['gain']:.0%} ({change['low']:.0%} to {change['high']:.0%}, {BASES[change['basis']]})"


def _print_changes(document: Mapping[str, Any], console: Console) -> None:
    if not document["changes"]:
        return
    console.print(Text("\nmost worth trying", style="bold"))
    for number, change in enumerate(document["changes"], start=1):
        console.print(f"  {number}. ", Text(change["overrides"], style="bold cyan"), sep="", soft_wrap=True)
        numerics = "; changes the numerics" if change["changes_numerics"] else ""
        console.print(_indented(f"step shorter by {gain_text(change)}{numerics}", 5))
        console.print(_indented(change["why"], 5))


def _indented(sentence: str, cells: int) -> Padding:
    return Padding(Text(sentence), (0, 0, 0, cells))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", header_style="dim")
    return table


def _breakdown(document: Mapping[str, Any]) -> Table:
    total = document["shares_of_seconds"]
    with_profiler = "" if document["is_cuda"] and document["is_timed"] else " (under the profiler)"
    table = _table(
        f"\nwhere a step of {show_seconds(total)} goes{with_profiler}", "part", "time", "share", ""
    )
    for name, seconds in document["breakdown"].items():
        bar = "█" * round(BAR_CELLS * seconds / total)
        table.add_row(name, show_seconds(seconds), f"{seconds / total:.1%}", Text(bar, style="cyan"))
    table.columns[3].justify = "left"
    return table


def _classes(document: Mapping[str, Any]) -> Table:
    of = "kernels" if document["is_cuda"] else "operators"
    table = _table(
        f"\n{of} by class", "class", "time", "share", "calls", "TFLOP", "GB", "FLOP/byte", "FLOP share"
    )
    total = sum(row["flops"] or 0.0 for row in document["classes"]) or 1.0
    for row in document["classes"]:
        flops, intensity = row["flops"], row["intensity"]
        table.add_row(
            row["title"],
            show_seconds(row["seconds"]),
            f"{row['share']:.1%}",
            f"{row['calls']:.0f}",
            "not known" if flops is None else f"{flops / 1e12:.3g}",
            f"{row['num_bytes'] / 1e9:.3g}",
            "" if intensity is None else f"{intensity:.3g}",
            "" if flops is None else f"{flops / total:.2%}",
        )
    return table


def _missed(document: Mapping[str, Any]) -> Table:
    table = _table(
        "\nmatmuls without the full rate of tensor cores", "m x k x n", "dtype", "time", "TFLOP/s", "why"
    )
    for row in document["missed"]:
        table.add_row(
            f"{row['m']} x {row['k']} x {row['n']}",
            row["dtype"],
            show_seconds(row["seconds"]),
            f"{row['flops_per_second'] / 1e12:.0f}",
            row["why"],
        )
    table.columns[4].justify = "left"
    return table


def _top(document: Mapping[str, Any]) -> Table:
    table = _table("\nmost time", "kernel" if document["is_cuda"] else "operator", "time", "calls", "class")
    for row in document["top"][:_MOST_TOP]:
        table.add_row(
            row["name"][:_NAME_WIDTH], show_seconds(row["seconds"]), f"{row['calls']:.0f}", row["kind"]
        )
    return table


def _memory(document: Mapping[str, Any]) -> Table:
    memory = document["memory"]
    table = _table(f"\nmemory at the peak, {show_bytes(memory['peak_bytes'])}", "category", "bytes", "share")
    for name, size in sorted(memory["peak_by_category"].items(), key=lambda item: -item[1]):
        table.add_row(name, show_bytes(size), f"{size / max(1, memory['peak_bytes']):.1%}")
    return table


def _ranks(document: Mapping[str, Any]) -> Table:
    table = _table("\nranks", "rank", "busy", "exposed communication", "data wait", "gaps", "peak memory")
    for row in document["ranks"]:
        peak = row["peak_bytes"]
        table.add_row(
            str(row["rank"]),
            *(show_seconds(row[f"{name}_seconds"]) for name in ("busy", "exposed", "data", "gap")),
            "" if peak is None else show_bytes(peak),
        )
    return table


def rates_line(document: Mapping[str, Any]) -> str:
    """Tokens per second, TFLOP/s and MFU in one line."""
    mfu = "" if document["mfu"] is None else f", MFU {document['mfu']:.1%}"
    flops = document["flops_per_second_per_device"] / 1e12
    return f"{show_count(document['tokens_per_second'])} tokens/s, {flops:.3g} TFLOP/s per device{mfu}"
