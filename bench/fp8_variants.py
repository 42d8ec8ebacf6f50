"""Where the time of an fp8 step goes, variant by variant, in one process on one GPU.

    python -m bench.fp8_variants --out fp8.txt                    every variant, until the time is up
    python -m bench.fp8_variants --out fp8.txt --only kept,whole  some of them

A variant is a few settings of a run, or something undone from outside for the measurement only. Steps are
made of random tokens on the device. Each variant is written as soon as it is measured: median step, model
TFLOP/s by the strict count, peak of allocated memory, time by class of kernel and the costliest kernels.
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
from bench.runtime import random_batch

from meshwright.bench.kernel_time import profiled, show_budget
from meshwright.bench.step import drawn_on, rates
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
    """What is measured under a name; `undone` is taken away or forced from outside."""

    name: str
    settings: tuple[str, ...]
    model: str = "llama-3.1-8b"
    num_layers: int | None = 8
    sequences: int = 2
    microbatches: int = 4
    undone: str = ""


CURRENT = ("precision.fp8.recipe=current", "precision.fp8.bf16_ends=0")
DELAYED = ("precision.fp8.recipe=delayed", "precision.fp8.bf16_ends=0")
BLOCKS = ("precision.fp8.recipe=blocks", "precision.fp8.bf16_ends=0")
KEPT = ("precision.fp8.cast_weights=per_step",)
ENDS = ("precision.fp8.recipe=current", "precision.fp8.bf16_ends=1")
VARIANTS = (
    Variant("kept", (*SMALL_STATE, *CURRENT, *KEPT)),
    Variant("delayed", (*SMALL_STATE, *DELAYED, *KEPT)),
    Variant("fast", (*SMALL_STATE, *CURRENT, *KEPT), undone="precise sums of gradients"),
    Variant("anew", (*SMALL_STATE, *CURRENT)),
    Variant("whole", (*SMALL_STATE, *CURRENT, *KEPT), num_layers=None),
    Variant("whole-long", (*SMALL_STATE, *CURRENT, *KEPT), num_layers=None, microbatches=8),
    Variant("apart", (*SMALL_STATE, *CURRENT, *KEPT), undone="joint products"),
    Variant("bf16", SMALL_STATE),
    Variant("blocks", (*SMALL_STATE, *BLOCKS, *KEPT)),
    Variant("whole-ends", (*SMALL_STATE, *ENDS, *KEPT), num_layers=None),
    Variant("whole-delayed", (*SMALL_STATE, *DELAYED, *KEPT), num_layers=None),
    Variant("1b", (*CURRENT, *KEPT), "llama-3.2-1b", None, sequences=8, microbatches=2),
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
def without(what: str) -> Iterator[None]:
    """Something of ours taken away."""
    if what == "precise sums of gradients":
        with patch.object(linear, "matmul", partial(matmul.matmul, fast=True)):
            yield
    elif what == "joint products":
        with patch.object(apply, "sharing", lambda _: ()):
            yield
    else:
        yield


def measure(variant: Variant) -> str:
    """One variant in words."""
    run = run_of(variant)
    mesh = build_mesh(run.parallel, join_world("cuda"))
    with drawn_on(mesh.device):
        training = build_training(run, mesh)
    batches, seconds = [random_batch(run) for _ in range(2)], []
    for step in range(WARMUP_STEPS + TIMED_STEPS):
        if step == 1:  # the peak of the first step may be a compiler's
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
    told = f"{median * 1e3:.1f} ms, {teraflops:.1f} TFLOP/s, {allocated:.1f} GiB, loss {outcome.loss:.5f}"
    return f"{told}\n{show_budget(budget, num_largest=25)}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", help=f"some of {','.join(variant.name for variant in VARIANTS)}")
    parser.add_argument("--seconds", type=float, default=120.0, help="after these no variant is begun")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else [variant.name for variant in VARIANTS]
    known = {variant.name: variant for variant in VARIANTS}
    started_at = time.perf_counter()
    with options.out.open("w") as out:
        for variant in [known[name] for name in names]:
            if time.perf_counter() - started_at > options.seconds:
                break
            began_at = time.perf_counter()
            with without(variant.undone):
                try:
                    words = measure(variant)
                except Exception as error:  # a variant that fails must not cost the others
                    words = f"{type(error).__name__}: {str(error)[:3000]}"
            text = f"== {variant.name}: {words}\nwall {time.perf_counter() - began_at:.0f} s\n"
            print(text, file=out, flush=True)
            print(text, flush=True)
            gc.collect()
            torch.compiler.reset()
            torch.cuda.empty_cache()
    leave_world()


if __name__ == "__main__":
    main()
