"""What a change of the step is worth: variants of our own step, one after the other in one process.

    python bench/step_variants.py --out DIR 124m:base 124m:joint 1b:base 1b:joint+chunk4 gemm:1b

A variant is `case:change+change`; every one is printed and appended to DIR/probe.txt as soon as it is
measured, with its kernels by class, the largest kernels and where the gaps are. Tokens are random and lie on
the device: no loader. Changes patch the product from outside, for a measurement only.
"""

import argparse
import gc
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from bench.step import CASES
from bench.variants.changes import CHANGES, Change
from torch import Tensor

from meshwright.bench.kernel_time import budget_of, kernel_recorder, kernels_of, show_budget
from meshwright.bench.step import drawn_on
from meshwright.bench.timing import Timing, measure, timing_of
from meshwright.data.batches import Batch, Microbatch
from meshwright.mesh import Mesh, build_mesh, join_world, leave_world
from meshwright.models.initialise import initialise
from meshwright.ops import loss_triton
from meshwright.plan.workload.flops import flops_per_token
from meshwright.spec import DataSpec, OptimSpec, PrecisionSpec, RunSpec, ScheduleSpec, SyntheticSpec
from meshwright.spec.text import dump_run, parse_run
from meshwright.train.build import build_training
from meshwright.train.gc_control import collector_off
from meshwright.train.step import train_step

EXACT = ("precision.weights=bf16_exact", "precision.gradients=bf16")
# case: name in bench/step.py, micro-batches of a step, settings
SETTINGS: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "124m": ("124m", 2, ()),
    "1b": ("1b", 2, ()),
    "1bx": ("1b", 2, EXACT),
    "8b8": ("8b", 4, (*EXACT, "optim.state=bf16", "model.num_layers=8")),
    "tiny": ("tiny", 2, ()),
    "tinyx": ("tiny", 2, EXACT),
    "tiny-gpt": ("tiny-gpt", 2, ()),
}
WARMUP_STEPS, PROFILED_STEPS = 3, 2


def run_of(case: str) -> RunSpec:
    """The run of a case, on made-up data."""
    name, accumulation, settings = SETTINGS[case]
    known = CASES[name]
    data = DataSpec(
        synthetic=SyntheticSpec(),
        sequence_length=known.sequence_length,
        batch_sequences=known.microbatch * accumulation,
        microbatch_sequences=known.microbatch,
    )
    run = RunSpec(
        name="probe",
        compile=True,
        model=known.model,
        precision=PrecisionSpec(compute="bf16"),
        optim=OptimSpec(lr=1e-4),
        schedule=ScheduleSpec(num_steps=1000, kind="constant"),
        data=data,
    )
    return parse_run(dump_run(run), list(settings)).require_valid()


def random_batch(run: RunSpec, device: torch.device) -> Batch:
    """Token r in proportion to 1 / (r + 10), as `random_tokens` draws them."""
    torch.manual_seed(0)
    data, vocab_size = run.data, run.model.vocab_size
    odds = 1.0 / (torch.arange(vocab_size, device=device, dtype=torch.float64) + 10.0)
    rows = (data.microbatch_sequences, data.sequence_length + 1)

    def one() -> Microbatch:
        u = torch.rand(rows, device=device, dtype=torch.float64)
        ids = torch.searchsorted(odds.cumsum(0) / odds.sum(), u).clamp(max=vocab_size - 1)
        positions = torch.arange(rows[1] - 1, device=device).expand(rows[0], -1).contiguous()
        weights = torch.full(positions.shape, 1.0 / data.batch_tokens, device=device)
        shares = torch.full(rows[:1], 1.0 / data.batch_sequences, device=device)
        return Microbatch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), weights, positions, None, shares)

    microbatches = tuple(one() for _ in range(data.batch_sequences // data.microbatch_sequences))
    return Batch(microbatches, data.batch_tokens, data.batch_sequences, tuple(range(data.batch_sequences)))


def gap_table(kernels: list[tuple[str, float, float]], num_steps: int) -> str:
    """The time without a kernel, by the kernels before and after it."""
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


def timed_steps(run: RunSpec, mesh: Mesh, change: Change, seconds: float) -> Iterator[str]:
    """Text, piece by piece: the times first, then the kernels."""
    device = mesh.device
    with drawn_on(device), change.inside():
        started_at = time.perf_counter()
        training = build_training(run, mesh, fill=partial(change.filled, initialise))
        change.adjust(training)
        batch = random_batch(run, device)

        def step() -> Tensor:
            return train_step(training, batch, learning_rate=1e-4).loss

        loss = float(step())
        compile_seconds = time.perf_counter() - started_at
        for _ in range(WARMUP_STEPS):
            last = step()
        if device.type != "cuda":
            yield f"first loss {loss:.9f}, last {float(last):.9f}; no times on {device.type}"
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
    """Mean seconds of a step over a window of about so many seconds, and how the steps spread."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    started_at = time.perf_counter()
    step()
    torch.cuda.synchronize()
    count = max(5, round(seconds / (time.perf_counter() - started_at)))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    with collector_off():
        marks[0].record()
        for mark in marks[1:]:
            step()
            mark.record()
        torch.cuda.synchronize()
    mean = marks[0].elapsed_time(marks[-1]) / 1e3 / count
    return mean, timing_of([a.elapsed_time(b) / 1e3 for a, b in pairwise(marks)])


@contextmanager
def clean_compiler() -> Iterator[None]:
    """Nothing of the variant before is left in memory or in the compiler."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    yield


# ---- products alone ----------------------------------------------------------------------------

# name: micro-batch tokens, then (rows out, columns in) of the matrices apart and joined
PRODUCTS = {
    "1b": (32768, {"q": (2048, 2048), "k": (512, 2048), "qkv": (3072, 2048), "up": (8192, 2048),
                   "gate+up": (16384, 2048), "down": (2048, 8192)}),
    "124m": (65536, {"q": (768, 768), "qkv": (2304, 768), "up": (3072, 768), "down": (768, 3072)}),
    "8b": (8192, {"q": (4096, 4096), "k": (1024, 4096), "qkv": (6144, 4096), "up": (14336, 4096),
                  "gate+up": (28672, 4096), "down": (4096, 14336)}),
}  # fmt: skip
HEADS = {"1b": (128256, 2048, (4096, 8192, 16384, 32768)), "8b": (128256, 4096, (4096, 8192)),
         "124m": (50304, 768, (8192, 9363, 16384, 32768, 65536))}  # fmt: skip


def gemm_table(case: str, device: torch.device, seconds: float) -> Iterator[str]:
    """TFLOP/s of the three products of each matrix, in bf16; then of the head by the rows of a chunk."""

    def rate(call: Callable[[], Any], flops: float) -> str:
        return f"{flops / measure(call, device, seconds=seconds).median / 1e12:>7.0f}"

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    def rates(x: Tensor, w: Tensor, dy: Tensor) -> str:
        total = torch.zeros(w.shape, device=device)
        into = partial(torch.addmm, total, dy.mT, x, out_dtype=torch.float32, out=total)
        calls = [
            partial(torch.mm, x, w.mT, out=torch.empty_like(dy)),
            partial(torch.mm, dy, w, out=torch.empty_like(x)),
            partial(torch.mm, dy, w.mT.contiguous().mT, out=torch.empty_like(x)),
            partial(torch.mm, dy.mT, x),
            partial(into, beta=0),
            partial(into, beta=1),
        ]
        return " ".join(rate(call, 2.0 * x.shape[0] * w.numel()) for call in calls)

    tokens, matrices = PRODUCTS[case]
    warm = normal(8192, 8192)
    measure(partial(torch.mm, warm, warm), device, seconds=1.0)  # the card lowers its clock when it is warm
    yield f"{'matrix':<10} {'y':>7} {'dx':>7} {'dx, W^T':>7} {'dW':>7} {'dW fp32':>7} {'+= fp32':>7}"
    for name, (n, k) in matrices.items():
        yield f"{name:<10} {rates(normal(tokens, k), normal(n, k), normal(tokens, n))}"
    v, d, chunks = HEADS[case]
    w = normal(v, d)
    for rows in chunks:
        yield f"head {rows:<5} {rates(normal(rows, d), w, normal(rows, v))}"


# ---- the rows of the loss ------------------------------------------------------------------------


def rows_table(case: str, device: torch.device) -> Iterator[str]:
    """Milliseconds for 1 GiB of logits by columns of a block and warps; TB/s of one read and one write."""
    v = HEADS[case][0]
    num_rows = 2**30 // (2 * v)
    targets_T = torch.randint(v, (num_rows,), device=device)

    def timed(call: Callable[[Tensor], Any]) -> str:
        logits_TV = torch.randn(num_rows, v, device=device, dtype=torch.bfloat16)
        seconds = measure(partial(call, logits_TV), device, seconds=0.1).median
        return f"{seconds * 1e3:>7.3f} ms {2 * logits_TV.nbytes / seconds / 1e12:>6.2f} TB/s"

    for block, warps in (
        (2048, 4),
        (2048, 8),
        (4096, 4),
        (4096, 8),
        (4096, 16),
        (8192, 16),
        (8192, 32),
        (16384, 32),
    ):
        with patch.multiple(loss_triton, BLOCK_COLUMNS=block, NUM_WARPS=warps):
            yield f"{block:>6} {warps:>4}  {timed(lambda one: loss_triton.unscaled_gradient(one, targets_T))}"


# ---- all of it ---------------------------------------------------------------------------------


def combined(names: str) -> Change:
    """Several changes as one."""
    parts = [CHANGES[name]() for name in names.split("+")]

    @contextmanager
    def inside() -> Iterator[None]:
        with ExitStack() as stack:
            for part in parts:
                stack.enter_context(part.inside())
            yield

    def filled(fill: Callable[..., None], model: Any, seed: int, *, device: torch.device) -> None:
        fill(model, seed, device=device)
        for part in parts:
            part.filled(lambda *_, **__: None, model, seed, device=device)

    def adjust(training: Any) -> None:
        for part in parts:
            part.adjust(training)

    return Change(inside=inside, filled=filled, adjust=adjust)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("variants", nargs="+", help=f"case:change+change; changes: {', '.join(CHANGES)}")
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--seconds", type=float, default=4.0, help="length of a timed window")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--limit", type=float, default=145.0, help="no variant begins after so many seconds")
    options = parser.parse_args()
    began_at = time.perf_counter()
    mesh = build_mesh(run_of("tiny").parallel, join_world(options.device))
    with (options.out / "probe.txt").open("a") as file:
        for variant in options.variants:
            seconds_gone = time.perf_counter() - began_at
            print(f"\n==== {variant} (after {seconds_gone:.0f} s)", flush=True)
            print(f"\n==== {variant}", file=file, flush=True)
            if seconds_gone > options.limit:
                print("left out: no time", flush=True)
                continue
            case, _, change = variant.partition(":")
            with clean_compiler():
                if case == "gemm":
                    texts = gemm_table(change, mesh.device, 0.2)
                elif case == "rows":
                    texts = rows_table(change, mesh.device)
                else:
                    texts = timed_steps(run_of(case), mesh, combined(change), options.seconds)
                try:
                    for text in texts:
                        print(text, flush=True)
                        print(text, file=file, flush=True)
                except Exception as error:  # the next variant is still worth its time
                    print(f"failed: {type(error).__name__}: {str(error)[:600]}", flush=True)
                    print(f"failed: {type(error).__name__}: {str(error)[:600]}", file=file, flush=True)
                finally:
                    del texts
    leave_world()


if __name__ == "__main__":
    main()
