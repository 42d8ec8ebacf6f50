"""Rows of `bench/step.py` for people: a line on the terminal, a page, a picture, and all of it as JSON."""

import json
import re
import statistics
from pathlib import Path
from typing import Any

from meshwright.plan.charts import Bar, stacked_bars

STYLE = (
    "<style>text{font:14px sans-serif;fill:#333}.strong{font-weight:600}.small{font-size:12px}"
    ".limit{stroke:#888;stroke-dasharray:4 3}</style>"
)
GIB = 2**30


def print_row(row: dict[str, Any]) -> None:
    name = row["label"]
    if "error" in row:
        print(f"{name:<28} {row['error']}", flush=True)
        return
    spread = (row["p90_seconds"] - row["p10_seconds"]) / row["step_seconds"]
    memory = (
        f"{row['allocated_bytes'] / GIB:.1f}/{row['reserved_bytes'] / GIB:.1f} GiB"
        if "allocated_bytes" in row
        else ""
    )
    kernel = shorten(row["attention_kernels"][0]) if row["attention_kernels"] else ""
    clock = f"{row['clock_mhz']:.0f} MHz {row['power_watts']:.0f} W" if "clock_mhz" in row else ""
    print(
        f"{name:<28} {row['teraflops']:>8.4g} TFLOP/s {row['tokens_per_second']:>9.0f} tok/s "
        f"{row['step_seconds'] * 1e3:>8.2f} ms ±{spread / 2:.1%} n={row['num_steps']} {memory} "
        f"loss {row['first_loss']:.5f} compile {row['compile_seconds']:.0f} s {clock} {kernel}",
        flush=True,
    )
    if row["graphs_compiled_in_window"]:
        print(
            f"  note: {row['graphs_compiled_in_window']} graphs were compiled in the timed window", flush=True
        )


def shorten(kernel: str) -> str:
    """The telling part of a kernel's name."""
    match = re.search(r"(cudnn\w*?sdpa\w*?_(?:fprop|bprop)\w{0,8}|flash_\w+|fmha\w+|pytorch_flash)", kernel)
    return (match.group(1) if match else kernel)[:48]


def merged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per label: the median over its rounds, and how far the rounds lie apart."""
    found = []
    for label in dict.fromkeys(row["label"] for row in rows):
        same = [row for row in rows if row["label"] == label and "error" not in row]
        if not same:
            found.append(next(row for row in rows if row["label"] == label))
            continue
        rates = [row["teraflops"] for row in same]
        middle = {
            key: statistics.median(row[key] for row in same)
            for key in ("teraflops", "tokens_per_second", "step_seconds", "p10_seconds", "p90_seconds")
        }
        apart = (max(rates) - min(rates)) / middle["teraflops"]
        found.append({**same[0], **middle, "rounds": len(same), "rounds_apart": apart})
    return found


def write_results(summary: dict[str, Any], folder: Path) -> None:
    """The JSON of everything, the page and the picture; prints where they are."""
    rows = merged(summary["rows"])
    facts = next((row for row in rows if "device" in row), None)
    if facts is None:
        return
    options = summary["options"]
    device = re.sub(r"[^a-z0-9]+", "-", facts["device"].lower().replace("nvidia ", "")).strip("-")
    kind = "ladder" if options["ladder"] else "step"
    stem = f"{kind}_{options['case']}_{options['precision']}_{device}_{facts['date']}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{stem}.json").write_text(json.dumps(summary, indent=1) + "\n")
    (folder / f"{stem}.svg").write_text(picture(rows))
    (folder / f"{stem}.md").write_text(page(summary, rows, facts, stem))
    print(f"written: {folder / stem}.md, .json, .svg", flush=True)


def picture(rows: list[dict[str, Any]]) -> str:
    working = [row for row in rows if "error" not in row]
    bars = [
        Bar(
            row["label"].split(":")[0].replace(", documented", " default")[:14],
            {"model TFLOP/s": row["teraflops"]},
            f"{row['teraflops']:.4g}",
        )
        for row in working
    ]
    drawn = stacked_bars(bars, full=max(row["teraflops"] for row in working) * 1.02)
    return drawn.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" width="940" ', 1).replace(
        ">", f">{STYLE}", 1
    )


def page(summary: dict[str, Any], rows: list[dict[str, Any]], facts: dict[str, Any], stem: str) -> str:
    options, run = summary["options"], summary["run"]
    title = "What each technique adds to" if options["ladder"] else "One training step of"
    data = run["data"]
    lines = [
        f"# {title} {run['model']['family']} in {options['precision']} on {facts['device']}",
        "",
        f"{facts['date']}, torch {facts['torch']}, CUDA {facts['cuda']}, cuDNN {facts['cudnn']}. Sequence "
        f"{data['sequence_length']}, micro-batch {data['microbatch_sequences']}, "
        f"{data['batch_sequences']} sequences a step; random tokens, frequent ones more often; the same "
        "weights for everyone. Model TFLOP/s by the strict count: 6 x parameters in matmuls + 6 x layers x "
        "width x sequence, per token. A step is data fetch, copy to the "
        "device, forward, backward, clipping and update.",
        "",
        f"First losses agree: {'yes' if summary['first_losses_agree'] else 'NO'}.",
        "",
        f"![model TFLOP/s]({stem}.svg)",
        "",
        "| who | TFLOP/s | tokens/s | step ms | p10 to p90 | rounds apart | allocated / reserved GiB "
        "| compile s | first loss | attention kernel | settings |",
        "|" + "---|" * 11,
    ]
    lines += [_cells(row) for row in rows]
    if summary["sweep"]:
        lines += [
            "",
            "## What was tried for each peer",
            "",
            "| who | settings | tokens/s | TFLOP/s |",
            "|---|---|---|---|",
        ]
        lines += [_sweep_cells(row) for row in summary["sweep"]]
    lines += _budget_lines(rows)
    return "\n".join(lines) + "\n"


def _cells(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"| {row['label']} | {row['error']} |" + " |" * 9
    memory = "-"
    if "allocated_bytes" in row:
        memory = f"{row['allocated_bytes'] / GIB:.1f} / {row['reserved_bytes'] / GIB:.1f}"
    kernels = ", ".join(dict.fromkeys(map(shorten, row["attention_kernels"][:3]))) or "-"
    cells = [
        row["label"],
        f"{row['teraflops']:.4g}",
        f"{row['tokens_per_second']:.0f}",
        f"{row['step_seconds'] * 1e3:.2f}",
        f"{row['p10_seconds'] * 1e3:.2f} to {row['p90_seconds'] * 1e3:.2f}",
        f"{row['rounds_apart']:.1%} of {row['rounds']}",
        memory,
        f"{row['compile_seconds']:.0f}",
        f"{row['first_loss']:.5f}",
        kernels,
        _settings(row["settings"]),
    ]
    return "| " + " | ".join(cells) + " |"


def _sweep_cells(row: dict[str, Any]) -> str:
    rates = row.get("error") or f"{row['tokens_per_second']:.0f} | {row['teraflops']:.4g}"
    return f"| {row['contender']} | {_settings(row['settings'])} | {rates} |"


def _settings(settings: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in settings.items()) or "as `train`"


def _budget_lines(rows: list[dict[str, Any]]) -> list[str]:
    """Where the time goes, in milliseconds of one step, a column for each contender."""
    known = [row for row in rows if row.get("kernel_seconds")]
    if not known:
        return []
    classes = list(dict.fromkeys(name for row in known for name in row["kernel_seconds"]))
    lines = ["", "## Where the time goes, ms of one step", ""]
    lines.append("| | " + " | ".join(row["label"] for row in known) + " |")
    lines.append("|---|" + "---|" * len(known))
    for name in classes:
        cells = (f"{row['kernel_seconds'].get(name, 0.0) * 1e3:.2f}" for row in known)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines
