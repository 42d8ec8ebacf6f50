"""What a change of the step is worth: variants of our own step, one after the other in one process.

    python -m bench.step_variants --out DIR 124m:base 124m:unfused 1b:base 1b:unfused+chunk4 gemm:1b

A variant is `case:change+change`; `gemm:case` and `loss:case` measure kernels by themselves. Every variant is
printed and appended to DIR/variants.txt as soon as it is measured: step time, memory, time by class of
kernel, the most expensive kernels, and the gaps between kernels. Tokens are random and on the device: there
is no data loader. Changes patch the product from outside, for the measurement only.
"""

import argparse
import gc
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import chain, pairwise
from pathlib import Path

import torch
from bench.variants.changes import CHANGES, combined
from bench.variants.kernel_tables import gemm_table, loss_table
from bench.workloads.cases import CASES
from bench.workloads.random_batch import random_batch
from torch import Tensor

from meshwright.bench.kernel_time import budget_of, kernel_recorder, kernels_of, show_budget
from meshwright.bench.step import fill_on_device
from meshwright.bench.timing import Timing, timing_of
from meshwright.mesh import Mesh, build_mesh, join_world, leave_world
from meshwright.plan.workload.flops import flops_per_token
from meshwright.spec import DataSpec, OptimSpec, PrecisionSpec, RunSpec, ScheduleSpec, SyntheticSpec
from meshwright.spec.text import dump_run, parse_run
from meshwright.train.build import build_training
from meshwright.train.gc_control import gc_paused
from meshwright.train.step import train_step

EXACT = ("precision.weights=bf16_exact", "precision.gradients=bf16")
# By name of a variant's case: case of bench/workloads/cases.py, micro-batches per step, overrides.
SETTINGS: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "124m": ("124m", 2, ()),
    "1b": ("1b", 2, ()),
    "1b-bf16": ("1b", 2, EXACT),
    "8b-8layers": ("8b", 4, (*EXACT, "optim.state=bf16", "model.num_layers=8")),
    "tiny": ("tiny", 2, ()),
    "tiny-bf16": ("tiny", 2, EXACT),
    "tiny-gpt": ("tiny-gpt", 2, ()),
}
WARMUP_STEPS, PROFILED_STEPS = 3, 2


def run_of(case: str) -> RunSpec:
    """The run of a case."""
    name, accumulation, overrides = SETTINGS[case]
    known = CASES[name]
    data = DataSpec(
        synthetic=SyntheticSpec(),
        sequence_length=known.sequence_length,
        batch_sequences=known.microbatch * accumulation,
        microbatch_sequences=known.microbatch,
    )
    run = RunSpec(
        name="variant",
        compile=True,
        model=known.model,
        precision=PrecisionSpec(compute="bf16"),
        optim=OptimSpec(lr=1e-4),
        schedule=ScheduleSpec(num_steps=1000, kind="constant"),
        data=data,
    )
    return parse_run(dump_run(run), list(overrides)).require_valid()


def gap_table(kernels: list[tuple[str, float, float]], num_steps: int) -> str:
    """The time in which no kernel runs, by the kernels before and after it."""
    gaps: dict[tuple[str, str], list[float]] = defaultdict(list)
    ordered = sorted(kernels, key=lambda kernel: kernel[1])
    last_name, last_end = ordered[0][0], ordered[0][2]
    for name, start, end in ordered[1:]:
        if start > last_end:
            gaps[last_name[:60], name[:60]].append(start - last_end)
        if end > last_end:
            last_name, last_end = name, end
    rows = sorted(gaps.items(), key=lambda item: -sum(item[1]))[:8]
    every = [gap for found in gaps.values() for gap in found]
    lines = [f"gaps: {sum(every) / num_steps * 1e3:.2f} ms in {len(every) // num_steps} of a step"]
    lines += [
        f"{sum(g) / num_steps * 1e3:>9.2f} {len(g) // num_steps:>6}  {a}  ->  {b}" for (a, b), g in rows
    ]
    return "\n".join(lines)


def timed_steps(run: RunSpec, mesh: Mesh, changes: str, seconds: float) -> Iterator[str]:
    """The times of a variant as text, then its kernels."""
    device = mesh.device
    with combined(changes):
        started_at = time.perf_counter()
        training = build_training(run, mesh, fill=fill_on_device)
        torch.manual_seed(0)
        batch = random_batch(run, device)

        def step() -> Tensor:
            return train_step(training, batch, learning_rate=1e-4).loss

        loss = float(step())
        compile_seconds = time.perf_counter() - started_at
        for _ in range(WARMUP_STEPS):
            last = step()
        if device.type != "cuda":
            yield f"first loss {loss:.9f}, last {float(last):.9f}; steps are not timed on {device.type}"
            return
        mean, steps = windowed(step, seconds)
        flops = flops_per_token(run.model, run.data.sequence_length) * run.data.batch_tokens
        yield (
            f"mean {flops / mean / 1e12:.1f} TFLOP/s, {mean * 1e3:.2f} ms, median {steps.median * 1e3:.2f}, "
            f"p10 {steps.p10 * 1e3:.2f}, p90 {steps.p90 * 1e3:.2f}, {steps.num_calls} steps; "
            f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB; first loss {loss:.6f}; "
            f"compile {compile_seconds:.0f} s"
        )
        with kernel_recorder() as recorded:
            for _ in range(PROFILED_STEPS):
                step()
            torch.cuda.synchronize()
        kernels = kernels_of(recorded)
        budget = budget_of(kernels, num_steps=PROFILED_STEPS)
        yield show_budget(budget, num_largest=25) + "\n" + gap_table(kernels, PROFILED_STEPS)


def windowed(step: Callable[[], Tensor], seconds: float) -> tuple[float, Timing]:
    """Mean seconds of a step over a window of about this many seconds, and the timing of single steps."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    started_at = time.perf_counter()
    step()
    torch.cuda.synchronize()
    count = max(5, round(seconds / (time.perf_counter() - started_at)))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    with gc_paused():
        marks[0].record()
        for mark in marks[1:]:
            step()
            mark.record()
        torch.cuda.synchronize()
    mean = marks[0].elapsed_time(marks[-1]) / 1e3 / count
    return mean, timing_of([a.elapsed_time(b) / 1e3 for a, b in pairwise(marks)])


def measured(variant: str, mesh: Mesh, seconds: float) -> Iterator[str]:
    """The results of one variant as text; an error is a result too, so that the next one is measured."""
    case, _, changes = variant.partition(":")
    try:
        if case == "gemm":
            yield from gemm_table(changes, mesh.device)
        elif case == "loss":
            yield from loss_table(changes, mesh.device)
        else:
            yield from timed_steps(run_of(case), mesh, changes or "base", seconds)
    except Exception as error:
        yield f"failed: {type(error).__name__}: {str(error)[:600]}"


def reset() -> None:
    """Free the memory and the compiled code of the last variant."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> None:
    """Measure the variants of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cases = f"cases: {', '.join(SETTINGS)}; changes: {', '.join(CHANGES)}"
    parser.add_argument("variants", nargs="+", help=f"case:change+change; {cases}")
    parser.add_argument("--out", type=Path, default=Path(), help="folder of variants.txt")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of a timed window")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--limit", type=float, default=145.0, help="seconds after which no variant is begun")
    options = parser.parse_args()
    began_at = time.perf_counter()
    mesh = build_mesh(run_of("tiny").parallel, join_world(options.device))
    with (options.out / "variants.txt").open("a") as file:
        for variant in options.variants:
            reset()
            is_late = time.perf_counter() - began_at > options.limit
            results = ["skipped: the time is up"] if is_late else measured(variant, mesh, options.seconds)
            for text in chain([f"\n==== {variant}"], results):
                print(text, flush=True)
                print(text, file=file, flush=True)
    leave_world()


if __name__ == "__main__":
    main()
