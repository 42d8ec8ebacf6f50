"""Step time and peak memory with and without each kind of offload, by micro-batch, on one GPU.

    python -m bench.offload --out bench/results/offload_<hardware>_<date>.md

Each row is a new training of random weights on random tokens, as in `bench.runtime`: warm-up steps, then
median and spread of timed steps, beside the planner's prediction. The page is written after every row. After
`--limit` seconds no further row is begun, and the page names the rows that are missing; a row takes about 10
seconds.
"""

import argparse
import datetime
import gc
import platform
import time
from pathlib import Path

import torch
from bench.runtime import measure, run_of

from meshwright.hardware import parse_cluster
from meshwright.mesh import leave_world
from meshwright.plan.predict import host_bytes, predict_run
from meshwright.spec import MemorySpec, RunSpec

FAMILY, LENGTH = "llama-3.2-1b", 4096
WARMUP_STEPS, TIMED_STEPS = 2, 4
# recompute, offload
NO_RECOMPUTE = [("none", ""), ("none", "optimizer"), ("none", "activations")]
WITH_RECOMPUTE = [("full", ""), ("full", "activations"), ("full", "optimizer,parameters,activations")]
# By micro-batch. The activations of eight sequences are 50 GB, which take long to pin on the host.
CHOICES = {
    4: [*NO_RECOMPUTE, *WITH_RECOMPUTE],
    1: [*NO_RECOMPUTE, *WITH_RECOMPUTE],
    8: [*NO_RECOMPUTE[:2], *WITH_RECOMPUTE],
}
HEADER = (
    "| micro-batch | recompute | offload | step ms | spread ms | against none | allocated GiB | "
    "host GiB | predicted ms | predicted GiB |\n|---|---|---|---|---|---|---|---|---|---|"
)


def case(batch: int, recompute: str, offload: str) -> RunSpec:
    """The run of one row."""
    run = run_of((FAMILY, LENGTH, batch, 1, recompute, False))
    return run.with_(memory=MemorySpec(recompute=recompute, offload=offload))


def row(run: RunSpec, plain_seconds: float | None, on: str) -> tuple[str, float | None]:
    """One line of the table, and the seconds without offload that later rows are compared with."""
    expected = predict_run(run, parse_cluster(on))
    memory = run.memory
    offload = ", ".join(memory.offload) or "none"
    settings = f"| {run.data.microbatch_sequences} | {memory.recompute} | {offload} "
    predicted = f"| {1e3 * expected.step_seconds:.0f} | {expected.peak_stage.allocated_bytes / 2**30:.1f} |"
    try:
        found = measure(run, warmup_steps=WARMUP_STEPS, timed_steps=TIMED_STEPS)
    except torch.OutOfMemoryError:
        return f"{settings}| out of memory | | | | {predicted}", plain_seconds
    seconds = found["step_seconds"]
    ratio = f"{seconds / plain_seconds:.2f} x" if plain_seconds else "1"
    return (
        f"{settings}| {1e3 * seconds:.1f} | {1e3 * found['spread_seconds']:.1f} | {ratio} "
        f"| {found['allocated_bytes'] / 2**30:.1f} | {host_bytes(run) / 2**30:.1f} {predicted}",
        plain_seconds or seconds,
    )


def main() -> None:
    """Measure every row and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="Markdown file of the page")
    parser.add_argument("--on", default="h200:1", help="device of the prediction")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds after which no row is begun")
    options = parser.parse_args()
    lines, skipped = [*title(), HEADER], []
    started_at = time.monotonic()
    for batch, choices in CHOICES.items():
        plain_seconds: float | None = None
        for recompute, offload in choices:
            if time.monotonic() - started_at > options.limit:
                skipped.append(f"micro-batch {batch}, recompute {recompute}, offload {offload or 'none'}")
                continue
            line, plain_seconds = row(case(batch, recompute, offload), plain_seconds, options.on)
            print(line, flush=True)
            lines.append(line)
            options.out.write_text("\n".join(lines) + "\n")
            gc.collect()
            torch.cuda.empty_cache()
    if skipped:
        lines += ["", f"Not measured for lack of time: {'; '.join(skipped)}."]
        print(lines[-1])
        options.out.write_text("\n".join(lines) + "\n")
    leave_world()


def title() -> list[str]:
    """Heading and provenance of the page."""
    return [
        f"# Offload on one {torch.cuda.get_device_name()}",
        "",
        f"`bench.offload`, {datetime.date.today()}, torch {torch.__version__}, Python "
        f"{platform.python_version()}. {FAMILY}, sequences of {LENGTH}, one micro-batch per step, bf16 "
        f"compute, fp32 weights, gradients and AdamW states; {WARMUP_STEPS} warm-up steps, median and spread "
        f"(largest less smallest) of {TIMED_STEPS}. Host GiB are predicted.",
        "",
    ]


if __name__ == "__main__":
    main()
