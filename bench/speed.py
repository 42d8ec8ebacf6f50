"""Writes docs/reference/speed.md from the results of `bench.step`: `python -m bench.speed`."""

import json
from pathlib import Path
from typing import Any

from bench.reports.step import merged

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "bench/results", ROOT / "docs/reference/speed.md"
OPENING = """# Speed

<!-- Written by `python -m bench.speed` from the results of `bench.step`. -->

Model TFLOP/s of one device by the strict count: 6 x parameters in matmuls + 6 x layers x width x sequence,
per token; recomputed work and the embedding do not count. A step is data fetch, copy to the device, forward,
backward, clipping and update. All contenders of a row start from the same weights and read the same tokens,
and the losses of their first steps agree. How it is measured, and how to measure your own machine:
[guide](../guides/measure.md).
"""


def page(summaries: dict[str, dict[str, Any]]) -> str:
    """The page; `summaries` are result documents by the stem of their files."""
    sound = {stem: found for stem, found in summaries.items() if found["first_losses_agree"]}
    steps = {stem: found for stem, found in sound.items() if stem.startswith("step_")}
    ladders = {stem: found for stem, found in summaries.items() if stem.startswith("ladder_")}
    lines = [OPENING, "## A training step, ours and others", ""]
    lines += _step_table(steps) if steps else ["Not measured yet."]
    if ladders:
        lines += ["", "## What each technique adds", ""]
        lines += [f"- [{_named(found)}](../../bench/results/{stem}.md)" for stem, found in ladders.items()]
    others = sorted(path.name for path in RESULTS.glob("*.md") if path.stem not in summaries)
    if others:
        lines += ["", "## Other measurements", ""]
        lines += [f"- [{name}](../../bench/results/{name})" for name in others]
    machines = sorted(path.parent.name for path in RESULTS.glob("*/gemm.md"))
    lines += [f"- [ceilings: {name}](../../bench/results/{name}/gemm.md)" for name in machines]
    return "\n".join(lines) + "\n"


def _step_table(steps: dict[str, dict[str, Any]]) -> list[str]:
    """One line per result file: the fastest setting of each peer, and ours in fp8 where it was measured."""
    rates = {stem: _best_rates(found["rows"]) for stem, found in steps.items()}
    names = list(dict.fromkeys(name for best in rates.values() for name in best))
    names.sort(key=lambda name: not name.startswith("ours"))
    lines = ["| case | device | " + " | ".join(names) + " | ours over the fastest peer |"]
    lines.append("|" + "---|" * (3 + len(names)))
    for stem, found in steps.items():
        best = rates[stem]
        others = [rate for name, rate in best.items() if not name.startswith("ours")]
        ratio = f"{best['ours'] / max(others):.2f}x" if others and "ours" in best else "-"
        cells = [f"{best[name]:.4g}" if name in best else "-" for name in names]
        device = next((row["device"] for row in found["rows"] if "device" in row), "-")
        case = f"[{_named(found)}](../../bench/results/{stem}.md)"
        lines.append(f"| {case} | {device} | " + " | ".join(cells) + f" | {ratio} |")
    return lines


def _best_rates(rows: list[dict[str, Any]]) -> dict[str, float]:
    """TFLOP/s by peer, of its fastest setting; only rows of the rounds count."""
    found: dict[str, float] = {}
    for row in merged([row for row in rows if row.get("kind") == "round"]):
        if "teraflops" in row:
            name = row.get("peer", row["label"])
            found[name] = max(found.get(name, 0.0), row["teraflops"])
    return found


def _named(found: dict[str, Any]) -> str:
    run, precision = found["run"], found["options"]["precision"]
    weights = run["precision"].get("weights", "fp32")
    length, batch = run["data"]["sequence_length"], run["data"]["microbatch_sequences"]
    kind = "bf16" if precision == "all" else precision
    mean = found["options"].get("documents")
    documents = f"separate documents of {mean} on average" if mean else "joined documents"
    model = f"{run['model']['family']}, {run['model']['num_layers']} layers"
    return f"{model}, {kind}, weights {weights}, {batch} x {length}, {documents}"


def main() -> None:
    """Read all results and write the page."""
    files = sorted([*RESULTS.glob("step_*.json"), *RESULTS.glob("ladder_*.json")])
    PAGE.write_text(page({path.stem: json.loads(path.read_text()) for path in files}))
    print(f"written: {PAGE}")


if __name__ == "__main__":
    main()
