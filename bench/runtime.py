"""Time and memory of one step of our runtime on one device, by model, micro-batch, recompute and compile.

    python bench/runtime.py --out rows.json

Each row is a fresh training of random weights on random tokens: warm-up steps, then the median and spread of
timed ones, with the peak of allocated and reserved bytes. The planner's figures for our own runtime are
calibrated on these rows.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from pathlib import Path
from unittest.mock import patch

import torch

from meshwright.data.batches import Batch, Microbatch
from meshwright.mesh import build_mesh, join_world, leave_world
from meshwright.models.initialise import initial_std
from meshwright.spec import DataSpec, MemorySpec, PrecisionSpec, RunSpec, ScheduleSpec, SyntheticSpec
from meshwright.spec.families import family
from meshwright.train.build import build_training
from meshwright.train.step import train_step

WARMUP_STEPS, TIMED_STEPS = 3, 6
# family, sequence length, sequences of a micro-batch, micro-batches, recompute, compile
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


def random_batch(run: RunSpec) -> Batch:
    sequences, length = run.data.microbatch_sequences, run.data.sequence_length
    total = run.data.batch_sequences
    shape = (sequences, length)

    def microbatch() -> Microbatch:
        return Microbatch(
            tokens_BS=torch.randint(run.model.vocab_size, shape, device="cuda"),
            targets_BS=torch.randint(run.model.vocab_size, shape, device="cuda"),
            weights_BS=torch.full(shape, 1.0 / (total * length), device="cuda"),
            positions_BS=torch.arange(length, device="cuda").expand(shape).contiguous(),
            documents_BS=None,
            sequence_weights_B=torch.full((sequences,), 1.0 / total, device="cuda"),
        )

    batches = tuple(microbatch() for _ in range(run.accumulation))
    return Batch(batches, num_tokens=total * length, num_sequences=total, sample_ids=())


def drawn_on_device(spec, parameter, seed):
    """Initial weights for a bench: the right spread, without drawing billions of numbers on one core."""
    if parameter.kind in ("norm", "bias"):
        return torch.full(parameter.shape, float(parameter.kind == "norm"), device="cuda")
    return torch.randn(parameter.shape, device="cuda") * initial_std(spec, parameter)


def measure(run: RunSpec, *, warmup_steps: int = WARMUP_STEPS, timed_steps: int = TIMED_STEPS) -> dict:
    mesh = build_mesh(run.parallel, join_world("cuda"))
    with patch.object(sys.modules[initial_std.__module__], "initial_value", drawn_on_device):
        training = build_training(run, mesh)
    batch = random_batch(run)
    seconds = []
    for step in range(warmup_steps + timed_steps):
        if step == 1:  # the peak of the first step may be a compiler's
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
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
