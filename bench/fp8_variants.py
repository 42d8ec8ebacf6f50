"""Variants of an fp8 step in one process on one GPU: time, memory, and time by class of kernel.

    python -m bench.fp8_variants --out fp8.txt                      every variant, until the time is up
    python -m bench.fp8_variants --out fp8.txt --only current,full  some of them

A variant is a run with a few settings, or with one of our techniques switched off by patching, for the
measurement only. Tokens are random and on the device. Each variant is written as soon as it is measured:
median step, model TFLOP/s by the strict count, peak allocated memory, time by class of kernel and the most
expensive kernels.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from bench.workloads.random_batch import random_batch

from meshwright.bench.kernel_time import profiled, show_budget
from meshwright.bench.step import fill_on_device, rates
from meshwright.mesh import build_mesh, join_world, leave_world
from meshwright.parallel import fp8 as apply
from meshwright.precision.fp8 import linear, matmul
from meshwright.spec import DataSpec, PrecisionSpec, RunSpec, ScheduleSpec, SyntheticSpec
from meshwright.spec.families import family
from meshwright.spec.text import dump_run, parse_run
from meshwright.train.build import build_training
from meshwright.train.step import train_step

WARMUP_STEPS, TIMED_STEPS = 3, 4
SMALL_STATE = ("precision.weights=bf16_exact", "precision.gradients=bf16", "optim.state=bf16")


@dataclass(frozen=True)
class Variant:
    """One variant: model, batch, overrides of the run, and what is switched off."""

    name: str
    settings: tuple[str, ...]
    model: str = "llama-3.1-8b"
    num_layers: int | None = 8
    sequences: int = 2
    microbatches: int = 4
    without: str = ""
    """`precise gradients`: fast accumulation for gradients too; `fused projections`."""


CURRENT = ("precision.fp8.recipe=current", "precision.fp8.bf16_layers_each_end=0")
DELAYED = ("precision.fp8.recipe=delayed", "precision.fp8.bf16_layers_each_end=0")
BLOCKS = ("precision.fp8.recipe=blockwise", "precision.fp8.bf16_layers_each_end=0")
PER_STEP = ("precision.fp8.cast_weights=per_step",)
ENDS = ("precision.fp8.recipe=current", "precision.fp8.bf16_layers_each_end=1")
VARIANTS = (
    Variant("current", (*SMALL_STATE, *CURRENT, *PER_STEP)),
    Variant("delayed", (*SMALL_STATE, *DELAYED, *PER_STEP)),
    Variant("fast-gradients", (*SMALL_STATE, *CURRENT, *PER_STEP), without="precise gradients"),
    Variant("cast-per-microbatch", (*SMALL_STATE, *CURRENT)),
    Variant("full", (*SMALL_STATE, *CURRENT, *PER_STEP), num_layers=None),
    Variant("full-8-microbatches", (*SMALL_STATE, *CURRENT, *PER_STEP), num_layers=None, microbatches=8),
    Variant("unfused", (*SMALL_STATE, *CURRENT, *PER_STEP), without="fused projections"),
    Variant("bf16", SMALL_STATE),
    Variant("blockwise", (*SMALL_STATE, *BLOCKS, *PER_STEP)),
    Variant("full-bf16-ends", (*SMALL_STATE, *ENDS, *PER_STEP), num_layers=None),
    Variant("full-delayed", (*SMALL_STATE, *DELAYED, *PER_STEP), num_layers=None),
    Variant("1b", (*CURRENT, *PER_STEP), "llama-3.2-1b", None, sequences=8, microbatches=2),
)


def run_of(variant: Variant) -> RunSpec:
    """The run of a variant."""
    model = family(variant.model)
    run = RunSpec(
        device="cuda",
        compile=True,
        model=model.with_(num_layers=variant.num_layers or model.num_layers),
        precision=PrecisionSpec(compute="bf16"),
        schedule=ScheduleSpec(num_steps=100),
        data=DataSpec(
            synthetic=SyntheticSpec(),
            sequence_length=4096,
            batch_sequences=variant.sequences * variant.microbatches,
            microbatch_sequences=variant.sequences,
            documents="joined",
        ),
    )
    return parse_run(dump_run(run), list(variant.settings)).require_valid()


@contextmanager
def switched_off(what: str) -> Iterator[None]:
    """Inside, one of our techniques is off."""
    if what == "precise gradients":
        with patch.object(linear, "matmul", partial(matmul.matmul, fast_accumulation=True)):
            yield
    elif what == "fused projections":
        with patch.object(apply, "linears_sharing_input", lambda _: ()):
            yield
    else:
        yield


def measure(variant: Variant) -> str:
    """The results of one variant as text."""
    run = run_of(variant)
    mesh = build_mesh(run.parallel, join_world("cuda"))
    training = build_training(run, mesh, fill=fill_on_device)
    batches, seconds = [random_batch(run, mesh.device) for _ in range(2)], []
    for step in range(WARMUP_STEPS + TIMED_STEPS):
        if step == 1:  # the first step's peak may be the compiler's
            torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        started_at = time.perf_counter()
        outcome = train_step(training, batches[step % 2], learning_rate=1e-5)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started_at)
    median = statistics.median(seconds[WARMUP_STEPS:])
    allocated = torch.cuda.max_memory_allocated() / 2**30
    budget = profiled(lambda: train_step(training, batches[0], learning_rate=1e-5), num_steps=1)
    teraflops = rates(run, {"step_seconds": median})["teraflops"]
    figures = f"{median * 1e3:.1f} ms, {teraflops:.1f} TFLOP/s, {allocated:.1f} GiB, loss {outcome.loss:.5f}"
    return f"{figures}\n{show_budget(budget, num_largest=25)}"


def main() -> None:
    """Measure the variants of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="file of the results")
    parser.add_argument(
        "--only", help=f"variants, comma-separated: {','.join(variant.name for variant in VARIANTS)}"
    )
    parser.add_argument("--limit", type=float, default=120.0, help="seconds after which no variant is begun")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else [variant.name for variant in VARIANTS]
    known = {variant.name: variant for variant in VARIANTS}
    started_at = time.perf_counter()
    with options.out.open("w") as out:
        for variant in [known[name] for name in names]:
            if time.perf_counter() - started_at > options.limit:
                break
            began_at = time.perf_counter()
            with switched_off(variant.without):
                try:
                    result = measure(variant)
                except Exception as error:  # the next variant is still measured
                    result = f"{type(error).__name__}: {str(error)[:3000]}"
            text = f"== {variant.name}: {result}\nwall {time.perf_counter() - began_at:.0f} s\n"
            print(text, file=out, flush=True)
            print(text, flush=True)
            gc.collect()
            torch.compiler.reset()
            torch.cuda.empty_cache()
    leave_world()


if __name__ == "__main__":
    main()
