"""Step time and peak memory with and without each offload, by batch size, on one device.

    python -m bench.offload --out bench/results/offload_<hardware>_<date>.md

Each row is a fresh training of random weights on random tokens, as in bench/runtime.py: warm-up steps, then
median and spread of timed ones. What the planner expects on this device stands beside it. The page is written
after every row. After `--seconds` no further row is begun, and what was left out is named; a row takes about
10 seconds.
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
ALONE = [("none", ""), ("none", "optimizer"), ("none", "activations")]
WITH_RECOMPUTE = [("full", ""), ("full", "activations"), ("full", "optimizer,parameters,activations")]
# By micro-batch. All activations of eight sequences are 50 GB, and the host pins a few GB a second.
CHOICES = {4: [*ALONE, *WITH_RECOMPUTE], 1: [*ALONE, *WITH_RECOMPUTE], 8: [*ALONE[:2], *WITH_RECOMPUTE]}
HEADER = (
    "| micro-batch | recompute | offload | step ms | spread ms | against none | allocated GiB | "
    "host GiB | predicted ms | predicted GiB |\n|---|---|---|---|---|---|---|---|---|---|"
)


def case(batch: int, recompute: str, offload: str) -> RunSpec:
    run = run_of((FAMILY, LENGTH, batch, 1, recompute, False))
    return run.with_(memory=MemorySpec(recompute=recompute, offload=offload))


def row(run: RunSpec, plain_seconds: float | None, on: str) -> tuple[str, float | None]:
    expected = predict_run(run, parse_cluster(on))
    memory = run.memory
    offload = ", ".join(memory.offload) or "none"
    words = f"| {run.data.microbatch_sequences} | {memory.recompute} | {offload} "
    told = f"| {1e3 * expected.step_seconds:.0f} | {expected.fullest.allocated_bytes / 2**30:.1f} |"
    try:
        found = measure(run, warmup_steps=WARMUP_STEPS, timed_steps=TIMED_STEPS)
    except torch.OutOfMemoryError:
        return f"{words}| out of memory | | | | {told}", plain_seconds
    seconds = found["step_seconds"]
    ratio = f"{seconds / plain_seconds:.2f} x" if plain_seconds else "1"
    return (
        f"{words}| {1e3 * seconds:.1f} | {1e3 * found['spread_seconds']:.1f} | {ratio} "
        f"| {found['allocated_bytes'] / 2**30:.1f} | {host_bytes(run) / 2**30:.1f} {told}",
        plain_seconds or seconds,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--on", default="h200:1", help="What the planner is asked about.")
    parser.add_argument("--seconds", type=float, default=90.0)
    options = parser.parse_args()
    lines, late = [*title(), HEADER], []
    started_at = time.monotonic()
    for batch, choices in CHOICES.items():
        plain_seconds: float | None = None
        for recompute, offload in choices:
            if time.monotonic() - started_at > options.seconds:
                late.append(f"micro-batch {batch}, recompute {recompute}, offload {offload or 'none'}")
                continue
            line, plain_seconds = row(case(batch, recompute, offload), plain_seconds, options.on)
            print(line, flush=True)
            lines.append(line)
            options.out.write_text("\n".join(lines) + "\n")
            gc.collect()
            torch.cuda.empty_cache()
    if late:
        lines += ["", f"No time was left for: {'; '.join(late)}."]
        print(lines[-1])
        options.out.write_text("\n".join(lines) + "\n")
    leave_world()


def title() -> list[str]:
    return [
        f"# Offload on one {torch.cuda.get_device_name()}",
        "",
        f"`bench/offload.py`, {datetime.date.today()}, torch {torch.__version__}, Python "
        f"{platform.python_version()}. {FAMILY}, sequences of {LENGTH}, one micro-batch a step, bf16 "
        f"compute, fp32 weights, gradients and AdamW states; {WARMUP_STEPS} warm-up steps, median and spread "
        f"(largest less smallest) of {TIMED_STEPS}. Host GiB are predicted.",
        "",
    ]


if __name__ == "__main__":
    main()
