"""The rows of `bench.step` as a line on the terminal, a Markdown page, a chart, and JSON."""

import json
import re
import statistics
from pathlib import Path
from typing import Any

from meshwright import svg

WIDTH, LABEL_WIDTH, VALUE_WIDTH, BAR, GAP = 940, 400, 240, 22, 8
GIB = 2**30
# Relative. Implementations round some hundred bf16 operations differently; fp8 has three bits of fraction.
LOSS_TOLERANCE = {"bf16": 1e-3, "fp8": 5e-3, "fp32": 1e-5}
Row = dict[str, Any]


def print_row(row: Row) -> None:
    name = row["label"]
    if "error" in row:
        print(f"{name:<60} {row['error']}", flush=True)
        return
    spread = (row["p90_seconds"] - row["p10_seconds"]) / row["step_seconds"]
    memory = (
        f"{row['allocated_bytes'] / GIB:.1f}/{row['reserved_bytes'] / GIB:.1f} GiB"
        if "allocated_bytes" in row
        else ""
    )
    kernel = shorten(row["attention_kernels"][0]) if row.get("attention_kernels") else ""
    clock = f"{row['clock_mhz']:.0f} MHz {row['power_watts']:.0f} W" if "clock_mhz" in row else ""
    print(
        f"{row.get('kind', ''):5} {name:<60} {row['teraflops']:>8.4g} TFLOP/s "
        f"{row['tokens_per_second']:>9.0f} tok/s {row['step_seconds'] * 1e3:>8.2f} ms ±{spread / 2:.1%} "
        f"n={row['num_steps']} {memory} loss {row['first_loss']:.5f} compile {row['compile_seconds']:.0f} s "
        f"{clock} {kernel}",
        flush=True,
    )
    if row["graphs_compiled_in_window"]:
        print(
            f"  note: {row['graphs_compiled_in_window']} graphs were compiled in the timed window", flush=True
        )


def shorten(kernel: str) -> str:
    """The part of a kernel's name that identifies it."""
    match = re.search(r"(cudnn\w*?sdpa\w*?_(?:fprop|bprop)\w{0,8}|flash_\w+|fmha\w+|pytorch_flash)", kernel)
    return (match.group(1) if match else kernel)[:48]


def losses_agree(rows: list[Row]) -> bool:
    """Whether all first losses equal that of the first row, within the tolerance of their precision."""
    known = [row for row in rows if "first_loss" in row]
    return all(
        abs(row["first_loss"] - known[0]["first_loss"])
        <= LOSS_TOLERANCE[row["precision"]] * abs(known[0]["first_loss"])
        for row in known
    )


def merged(rows: list[Row]) -> list[Row]:
    """One row per label: the median over its rounds, and the spread between rounds."""
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
        # The last round has the kernel profile.
        found.append({**same[-1], **middle, "rounds": len(same), "rounds_apart": apart})
    return found


def stem_of(kind: str, case: str, facts: Row) -> str:
    """File name of a measurement without suffix: kind, case, device and date."""
    device = re.sub(r"[^a-z0-9]+", "-", facts["device"].lower().replace("nvidia ", "")).strip("-")
    return f"{kind}_{case}_{device}_{facts['date']}"


def write_files(folder: Path, stem: str, summary: dict[str, Any], page_text: str, rows: list[Row]) -> None:
    """Write the JSON document, the page and the chart."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{stem}.json").write_text(json.dumps(summary, indent=1) + "\n")
    (folder / f"{stem}.svg").write_text(picture(rows))
    (folder / f"{stem}.md").write_text(page_text)


def write_results(summary: dict[str, Any], folder: Path) -> None:
    """Write all files of a case, if anything was measured."""
    facts = next((row for row in [*summary["rows"], *summary["sweep"]] if "device" in row), None)
    if facts is None:
        return
    options = summary["options"]
    precision = "" if options["precision"] == "all" else f"_{options['precision']}"
    documents = "_documents" if options.get("documents") else ""
    stem = stem_of("step", options["case"] + documents + precision, facts)
    write_files(folder, stem, summary, page(summary, facts, stem), merged(summary["rows"]))


# ---- the chart ----------------------------------------------------------------------------------


def picture(rows: list[Row]) -> str:
    """A bar chart with one bar per measured row, coloured by contender."""
    working = [row for row in rows if "error" not in row]
    peers = list(dict.fromkeys(_peer(row).split(",")[0] for row in working))
    colours = dict(zip(peers, svg.PALETTE, strict=False))
    longest = max((row["teraflops"] for row in working), default=1.0)
    scale = svg.Scale(0.0, longest, LABEL_WIDTH, WIDTH - VALUE_WIDTH)
    parts = []
    for index, row in enumerate(working):
        y, end = 8 + index * (BAR + GAP), scale.place(row["teraflops"])
        text = f"{row['teraflops']:.4g} TFLOP/s, {row['tokens_per_second'] / 1e3:.4g}k tokens/s"
        shown = row["label"] if len(row["label"]) < 62 else row["label"][:60] + "…"
        parts += [
            svg.text(LABEL_WIDTH - 8, y + 15, shown, anchor="end"),
            svg.rect(LABEL_WIDTH, y, end - LABEL_WIDTH, BAR, fill=colours[_peer(row).split(",")[0]]),
            svg.text(end + 8, y + 15, text, weight=600),
        ]
    height = 16 + len(working) * (BAR + GAP)
    return svg.document(parts, WIDTH, height, label="Model TFLOP/s")


def _peer(row: Row) -> str:
    return row.get("peer", row["label"])


# ---- the page -----------------------------------------------------------------------------------


def page(summary: dict[str, Any], facts: Row, stem: str) -> str:
    """The results page with everything that is needed to judge them."""
    run, rows = summary["run"], compared(summary)
    lines = [
        f"# One training step of {run['model']['family']} on {facts['device']}",
        "",
        provenance(summary, facts),
        "The contenders are alive on the device together and are timed in interleaved windows (A-B-A-B). A "
        "figure is the median over the rounds, and a round's figure is the median of its steps.",
        "",
        f"First losses agree: {'yes' if summary['first_losses_agree'] else 'NO'} (to 0.1% between "
        "implementations in bf16, which round some hundred operations differently; to 0.5% in fp8, which has "
        "three bits of fraction).",
        *summary["notes"],
        "`hf` is transformers' model in Accelerate's loop, `plain` is bench/contenders/plain_decoder.py, "
        "`lightning` is that model in Lightning's Trainer.",
        "",
        f"![model TFLOP/s]({stem}.svg)",
        "",
        *_ratio_lines(rows),
        "| contender | TFLOP/s | tokens/s | step ms | p10 to p90 | spread of rounds "
        "| allocated / reserved GiB | compile s | first loss | MHz, W | attention kernel |",
        "|" + "---|" * 11,
        *map(_cells, rows),
        *_sweep_lines(summary),
        *_budget_lines(rows),
    ]
    return "\n".join(lines) + "\n"


def provenance(summary: dict[str, Any], facts: Row) -> str:
    """Date, versions, the batch, and how FLOPs are counted."""
    data = summary["run"]["data"]
    versions = "".join(f", {name} {version}" for name, version in summary["versions"].items() if version)
    micro, mean = data["microbatch_sequences"], summary["options"].get("documents")
    documents = f"separate documents of {mean} tokens on average" if mean else "joined documents"
    return (
        f"{facts['date']}, torch {facts['torch']}, CUDA {facts['cuda']}, cuDNN {facts['cudnn']}, driver "
        f"{facts.get('driver')}{versions}. A step has {data['batch_sequences']} sequences of "
        f"{data['sequence_length']} tokens ({data['batch_sequences'] // micro} x {micro} of ours: "
        f"micro-batches x sequences); {documents}; random tokens with a Zipf-like distribution; the same "
        "weights for all. Model TFLOP/s by the strict count: 6 x parameters in matmuls + 6 x layers x width "
        "x sequence, per token; recomputed work does not count. A step is data fetch, copy to the device, "
        f"forward, backward, clipping and update. The measurement took {summary['seconds']} s."
    )


def compared(summary: dict[str, Any]) -> list[Row]:
    """The rows of the rounds, and the errors of contenders without any."""
    rows = merged(summary["rows"])
    measured = {_peer(row) for row in rows if "error" not in row}
    return [row for row in rows if "error" not in row or _peer(row) not in measured]


def _ratio_lines(rows: list[Row]) -> list[str]:
    rates = {_peer(row): row["teraflops"] for row in rows if row.get("kind") == "round"}
    others = {name: rate for name, rate in rates.items() if not name.startswith("ours")}
    if "ours" not in rates or not others:
        return []
    best = max(others, key=others.__getitem__)
    return [f"Ours is {rates['ours'] / others[best]:.3f} times the fastest peer, {best}.", ""]


def _cells(row: Row) -> str:
    if "error" in row:
        return f"| {row['label']} | {row['error']} |" + " |" * 9
    memory = "-"
    if "allocated_bytes" in row:
        memory = f"{row['allocated_bytes'] / GIB:.1f} / {row['reserved_bytes'] / GIB:.1f}"
    kernels = ", ".join(dict.fromkeys(map(shorten, row.get("attention_kernels", [])[:3]))) or "-"
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
        f"{row['clock_mhz']:.0f}, {row['power_watts']:.0f}" if "clock_mhz" in row else "-",
        kernels,
    ]
    return "| " + " | ".join(cells) + " |"


def _sweep_lines(summary: dict[str, Any]) -> list[str]:
    """One line for each setting of a peer, the fastest first; each was timed in one window."""
    rows = [row for row in [*summary["sweep"], *summary["rows"]] if not _peer(row).startswith("ours")]
    first = {row["label"]: row for row in reversed(rows)}.values()
    if not first:
        return []
    ordered = sorted(first, key=lambda row: (_peer(row), -row.get("teraflops", 0.0)))
    lines = ["", "## Settings tried for each peer", "", "The fastest of each took part in the rounds.", ""]
    lines += ["| setting (micro-batches x sequences) | TFLOP/s | tokens/s | GiB |", "|---|---|---|---|"]
    for row in ordered:
        if "error" in row:
            lines.append(f"| {row['label']} | {row['error']} | | |")
            continue
        memory = f"{row['allocated_bytes'] / GIB:.1f}" if "allocated_bytes" in row else "-"
        rates = f"{row['teraflops']:.4g} | {row['tokens_per_second']:.0f} | {memory}"
        lines.append(f"| {row['label']} | {rates} |")
    return lines


def _budget_lines(rows: list[Row]) -> list[str]:
    """Milliseconds of one step by class of kernel, with a column for each contender."""
    known = [row for row in rows if row.get("kernel_seconds")]
    if not known:
        return []
    classes = list(dict.fromkeys(name for row in known for name in row["kernel_seconds"]))
    lines = ["", "## Time by class of kernel, ms of one step", ""]
    lines.append("| | " + " | ".join(row["label"] for row in known) + " |")
    lines.append("|---|" + "---|" * len(known))
    for name in classes:
        cells = (f"{row['kernel_seconds'].get(name, 0.0) * 1e3:.2f}" for row in known)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines
