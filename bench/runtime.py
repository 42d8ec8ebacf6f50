"""Time and memory of our step on one GPU, by model, micro-batch, recompute and compile.

    python -m bench.runtime --out rows.json

Each row is a new training of random weights on random tokens: warm-up steps, then median and spread of timed
steps, and peak allocated and reserved bytes. The planner's constants of our own runtime are calibrated on
these rows.
"""

import argparse
import gc
import json
import statistics
import time
from pathlib import Path

import torch
from bench.workloads.random_batch import random_batch

from meshwright.bench.step import fill_on_device
from meshwright.mesh import build_mesh, join_world, leave_world
from meshwright.spec import DataSpec, MemorySpec, PrecisionSpec, RunSpec, ScheduleSpec, SyntheticSpec
from meshwright.spec.families import family
from meshwright.train.build import build_training
from meshwright.train.step import train_step

WARMUP_STEPS, TIMED_STEPS = 3, 6
# family, sequence length, sequences per micro-batch, micro-batches, recompute, compile
CASES = [
    ("llama-3.2-1b", 4096, 1, 1, "none", False),
    ("llama-3.2-1b", 4096, 4, 1, "none", False),
    ("llama-3.2-1b", 4096, 4, 2, "none", False),
    ("llama-3.2-1b", 4096, 4, 1, "selective", False),
    ("llama-3.2-1b", 4096, 4, 1, "full", False),
    ("llama-3.2-1b", 4096, 1, 1, "none", True),
    ("llama-3.2-1b", 4096, 4, 1, "none", True),
    ("llama-3.2-1b", 4096, 4, 1, "full", True),
    ("gpt2-124m", 1024, 16, 1, "none", False),
    ("gpt2-124m", 1024, 32, 1, "none", True),
    ("llama-3.2-3b", 4096, 2, 1, "none", False),
    ("llama-3.2-3b", 4096, 2, 1, "none", True),
]


def run_of(case: tuple) -> RunSpec:
    """The run of a case."""
    name, length, sequences, microbatches, recompute, is_compiled = case
    return RunSpec(
        device="cuda",
        compile=is_compiled,
        model=family(name),
        precision=PrecisionSpec(compute="bf16"),
        memory=MemorySpec(recompute=recompute),
        schedule=ScheduleSpec(num_steps=100),
        data=DataSpec(
            synthetic=SyntheticSpec(),
            sequence_length=length,
            batch_sequences=sequences * microbatches,
            microbatch_sequences=sequences,
            documents="joined",
        ),
    )


def measure(run: RunSpec, *, warmup_steps: int = WARMUP_STEPS, timed_steps: int = TIMED_STEPS) -> dict:
    """Step time and peak memory of one run, on the first GPU."""
    mesh = build_mesh(run.parallel, join_world("cuda"))
    training = build_training(run, mesh, fill=fill_on_device)
    batch = random_batch(run, mesh.device)
    seconds = []
    for step in range(warmup_steps + timed_steps):
        if step == 1:  # the first step's peak may be the compiler's
            torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        started_at = time.perf_counter()
        outcome = train_step(training, batch, learning_rate=1e-5)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started_at)
    timed = seconds[warmup_steps:]
    return {
        "step_seconds": statistics.median(timed),
        "spread_seconds": max(timed) - min(timed),
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "loss": float(outcome.loss),
    }


def main() -> None:
    """Measure every case; the file is written after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the rows")
    options = parser.parse_args()
    rows = []
    for case in CASES:
        keys = ("family", "sequence_length", "microbatch_sequences", "accumulation", "recompute", "compile")
        row = dict(zip(keys, case, strict=True))
        row |= {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        try:
            row |= measure(run_of(case))
        except torch.OutOfMemoryError:
            row |= {"error": "out of memory"}
        print(json.dumps(row), flush=True)
        rows.append(row)
        options.out.write_text(json.dumps(rows, indent=1))
        gc.collect()
        torch.compiler.reset()
        torch.cuda.empty_cache()
    leave_world()


if __name__ == "__main__":
    main()
