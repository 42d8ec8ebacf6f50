"""The results of `bench.ladder` as a page, a chart and JSON."""

from pathlib import Path
from typing import Any

from bench.reports.step import GIB, Row, losses_agree, provenance, stem_of, write_files


def write_ladder(summary: dict[str, Any], folder: Path) -> None:
    """Write all files, if anything was measured."""
    facts = next((row for row in summary["rows"] if "device" in row), None)
    if facts is not None:
        stem = stem_of("ladder", summary["options"]["case"], facts)
        write_files(folder, stem, summary, ladder_page(summary, facts, stem), summary["rows"])


def ladder_page(summary: dict[str, Any], facts: Row, stem: str) -> str:
    """The page: one line per rung, with its gain over the rung before."""
    lines = [
        f"# What each technique adds to a step of {summary['run']['model']['family']} on {facts['device']}",
        "",
        provenance(summary, facts),
        "Every rung includes the rungs above it. A technique is switched off by patching: the product has no "
        "such switches.",
        "",
        f"First losses agree: {'yes' if losses_agree(summary['rows']) else 'NO'}.",
        "",
        f"![model TFLOP/s]({stem}.svg)",
        "",
        "| rung | TFLOP/s | step ms | times the rung before | allocated GiB | first loss |",
        "|" + "---|" * 6,
    ]
    before: float | None = None
    for row in summary["rows"]:
        lines.append(_cells(row, before))
        before = row.get("teraflops", before)
    return "\n".join(lines) + "\n"


def _cells(row: Row, before: float | None) -> str:
    if "error" in row:
        return f"| {row['label']} | {row['error']} | | | | |"
    gain = f"{row['teraflops'] / before:.3f}" if before else "-"
    memory = f"{row['allocated_bytes'] / GIB:.1f}" if "allocated_bytes" in row else "-"
    cells = (f"{row['teraflops']:.4g}", f"{row['step_seconds'] * 1e3:.2f}", gain, memory)
    return f"| {row['label']} | " + " | ".join(cells) + f" | {row['first_loss']:.5f} |"
