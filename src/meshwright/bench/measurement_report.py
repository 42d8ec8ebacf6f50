"""Measured rows as text: a table that grows row by row, charts, and a folder with all results."""

import json
import tempfile
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.bench.comm_charts import comm_charts, scaling_chart
from meshwright.bench.picture import bars, chart
from meshwright.errors import SpecError
from meshwright.hardware.catalogue import Device
from meshwright.plan.time.kernels import tile_efficiency
from meshwright.units import show_bytes, show_seconds

Row = dict[str, Any]
Sections = dict[str, list[Row]]
# Columns of each kind of row: key, heading, width, format of a value.
_PLAIN: Callable[[Any], str] = str
Column = tuple[str, str, int, Callable[[Any], str]]


def _rate(value: float) -> str:
    return f"{value:.4g}"


def _share(value: float) -> str:
    return f"{value:.1%}"


_SPREAD: Column = ("spread", "spread", 7, _share)
_SECONDS: Column = ("seconds", "median", 9, show_seconds)
COLUMNS: dict[str, tuple[Column, ...]] = {
    "matmuls": (
        ("model", "model", 14, _PLAIN),
        ("layer", "layer", 18, _PLAIN),
        ("m", "m", 6, _PLAIN),
        ("n", "n", 7, _PLAIN),
        ("k", "k", 6, _PLAIN),
        ("precision", "precision", 9, _PLAIN),
        _SECONDS,
        _SPREAD,
        ("teraflops", "TFLOP/s", 9, _rate),
    ),
    "shapes": (
        ("m", "m", 6, _PLAIN),
        ("n", "n", 7, _PLAIN),
        ("k", "k", 6, _PLAIN),
        ("precision", "precision", 9, _PLAIN),
        _SECONDS,
        _SPREAD,
        ("teraflops", "TFLOP/s", 9, _rate),
        ("of_best", "of best", 8, _share),
    ),
    "attention": (
        ("backend", "kernel", 10, _PLAIN),
        ("head_width", "width", 6, _PLAIN),
        ("sequence", "sequence", 9, _PLAIN),
        ("batch", "batch", 6, _PLAIN),
        ("forward_teraflops", "forward TFLOP/s", 16, _rate),
        ("backward_teraflops", "backward", 9, _rate),
        _SPREAD,
        ("is_chosen", "chosen", 7, lambda value: "yes" if value else ""),
        ("kernel", "", 0, lambda name: name[:60]),
    ),
    "copies": (
        ("what", "what", 26, _PLAIN),
        ("bytes", "bytes", 10, show_bytes),
        _SECONDS,
        _SPREAD,
        ("gigabytes_per_second", "GB/s", 9, _rate),
    ),
    "collectives": (
        ("kind", "collective", 15, _PLAIN),
        ("ranks", "ranks", 6, _PLAIN),
        ("nodes", "nodes", 6, _PLAIN),
        ("bytes", "message", 10, show_bytes),
        _SECONDS,
        ("bus_gigabytes_per_second", "bus GB/s", 9, _rate),
    ),
    "scaling": (
        ("kind", "scaling", 8, _PLAIN),
        ("ranks", "ranks", 6, _PLAIN),
        ("batch_tokens", "tokens/step", 12, _PLAIN),
        ("seconds", "step", 9, show_seconds),
        ("predicted_seconds", "predicted", 10, show_seconds),
        ("tokens_per_second", "tokens/s", 10, _rate),
        ("efficiency", "efficiency", 11, _share),
        ("predicted_efficiency", "predicted", 10, _share),
    ),
    "data": (
        ("sequence", "sequence", 9, _PLAIN),
        ("documents", "documents", 10, _PLAIN),
        ("batch_tokens", "tokens", 8, _PLAIN),
        ("seconds", "mean", 9, show_seconds),
        _SPREAD,
        ("tokens_per_second", "tokens/s", 11, _rate),
    ),
    "checkpoint": (
        ("what", "what", 8, _PLAIN),
        ("bytes", "size", 10, show_bytes),
        ("seconds", "seconds", 9, show_seconds),
        ("megabytes_per_second", "MB/s", 9, _rate),
    ),
}

COLUMNS["axes"] = (("axis", "axis", 12, _PLAIN), *COLUMNS["collectives"])


def heading(kind: str) -> str:
    """The line above the rows of a kind."""
    return " ".join(f"{title:>{width}}" for _, title, width, _ in COLUMNS[kind])


def line(kind: str, row: Row) -> str:
    """One row in columns; missing values are left empty, and an error stands at the end."""
    cells = [
        f"{shown(row[key]) if row.get(key) is not None else '':>{width}}"
        for key, _, width, shown in COLUMNS[kind]
    ]
    return " ".join(cells) + (f"  {row['error']}" if "error" in row else "")


def log_rows(kind: str, rows: Iterable[Row], log: Callable[[str], None]) -> list[Row]:
    """Log each row as it is measured, and return all of them."""
    log(heading(kind))
    measured = []
    for row in rows:
        log(line(kind, row))
        measured.append(row)
    return measured


def width_bars(rows: Sequence[Row]) -> str:
    """The sweep of widths as a bar chart for a terminal."""
    return bars([(str(row["n"]), row["teraflops"]) for row in rows])


def charts(bench: str, sections: Sections, device: Device | None) -> dict[str, str]:
    """SVG charts by file name."""
    found: dict[str, str] = {}
    if sections.get("widths"):
        found["gemm_widths"] = _width_chart(sections["widths"], device)
    if bench == "attention":
        for width in sorted({row["head_width"] for row in sections["attention"]}):
            found[f"attention_width_{width}"] = _attention(sections["attention"], width)
    if bench == "comm":
        found |= comm_charts(sections.get("axes") or sections["collectives"])
    if bench == "scaling":
        found["scaling"] = scaling_chart(sections["scaling"])
    return found


def _width_chart(rows: Sequence[Row], device: Device | None) -> str:
    lines = {"measured": [(float(row["n"]), row["teraflops"]) for row in rows]}
    if device is not None:
        lines["model: tiles and waves"] = _modelled(rows, device)
    title = f"{rows[0]['m']} x n x {rows[0]['k']} in {rows[0]['precision']}: what a width costs"
    return chart(title, lines, x_name="n", y_name="TFLOP/s")


def _modelled(rows: Sequence[Row], device: Device) -> list[tuple[float, float]]:
    """The planner's tile efficiency of each shape, scaled to the best measured rate."""
    columns = {key: np.array([float(row[key]) for row in rows]) for key in ("m", "n")}
    shares = tile_efficiency(columns["m"], columns["n"], np.ones(len(rows)), device)
    scale = max(row["teraflops"] for row in rows) / float(shares.max())
    return [(float(row["n"]), float(share) * scale) for row, share in zip(rows, shares, strict=True)]


def _attention(rows: Sequence[Row], width: int) -> str:
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row["head_width"] == width and "error" not in row:
            seconds = row["forward_seconds"] + row["backward_seconds"]
            work = row["forward_seconds"] * row["forward_teraflops"] * 3.0
            lines.setdefault(row["backend"], []).append((float(row["sequence"]), work / seconds))
    title = f"Causal attention, head width {width}: forward and backward, counted as 3 forward passes"
    return chart(title, lines, x_name="sequence", y_name="TFLOP/s", is_log=True)


def write_folder(folder: Path, bench: str, document: Mapping[str, Any], device: Device | None) -> list[Path]:
    """Write `<bench>.json`, `<bench>.md` and the charts; returns their paths."""
    sections: Sections = document["sections"]
    drawings = charts(bench, sections, device)
    texts = {f"{name}.svg": svg for name, svg in drawings.items()}
    texts[f"{bench}.json"] = json.dumps(document, indent=1) + "\n"
    texts[f"{bench}.md"] = page(bench, document, list(drawings))
    prepare_folder(folder)
    with _writing(folder):
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]


@contextmanager
def _writing(folder: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise SpecError(
            f"the results cannot be written: {error.strerror or error}",
            where=str(folder),
            hint="name another folder with -o",
        ) from None


def prepare_folder(folder: Path) -> None:
    """Create the folder for results; SpecError where it cannot be written to, before anything is measured."""
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()


def page(bench: str, document: Mapping[str, Any], drawings: Sequence[str]) -> str:
    """The rows as Markdown, with device and versions."""
    facts = (
        f"{key} {document[key]}" for key in ("date", "torch", "cuda", "cudnn", "threads") if document.get(key)
    )
    clock = (f"{document[key]:.0f} {key}" for key in ("clock_mhz", "power_watts") if key in document)
    lines = [f"# {bench} on {document['device']}", "", ", ".join([*facts, *clock]) + "."]
    lines += [part for name in drawings for part in ("", f"![{name}]({name}.svg)")]
    for section, rows in document["sections"].items():
        columns = [c for c in COLUMNS[KIND_OF[section]] if any(row.get(c[0]) is not None for row in rows)]
        lines += ["", f"## {section}", "", "| " + " | ".join(title for _, title, _, _ in columns) + " |"]
        lines.append("|" + "---|" * len(columns))
        for row in rows:
            cells = [shown(row[key]) if row.get(key) is not None else "" for key, _, _, shown in columns]
            lines.append("| " + " | ".join(cells) + (f" | {row['error']} |" if "error" in row else " |"))
    return "\n".join(lines) + "\n"


KIND_OF = {
    "layers": "matmuls",
    "squares": "matmuls",
    "widths": "shapes",
    "vocabulary": "shapes",
    "attention": "attention",
    "copies": "copies",
    "collectives": "collectives",
    "axes": "axes",
    "scaling": "scaling",
    "data": "data",
    "checkpoint": "checkpoint",
}
"""Kind of the rows of each section, by which their columns are chosen."""
