"""Predicted, traced and measured memory of one rank of many layouts, on one GPU.

    python -m bench.rehearsal --out bench/results/rehearsal_<device>_<date>.md
    python -m bench.rehearsal --only "8B, full, compiled" --out FILE          cases whose name contains this
    python -m bench.rehearsal --device cpu --tiny --out FILE                  for a try: nothing is measured

For every case: the planner's closed form, the trace on the CPU with the same torch, and the rank itself with
real tensors on the GPU (the fake process group completes all collectives). Traces run in other processes
while the GPU measures. A case that fails is a row with its error; a measuring process that dies is restarted
with the next case.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

import torch

from meshwright.hardware import parse_cluster
from meshwright.plan.memory.rank_bytes import memory
from meshwright.plan.workload.formats import runtime_of, workload_of
from meshwright.plan.workload.layouts import one_layout
from meshwright.rehearse.measure import measure_rank
from meshwright.rehearse.rank_report import rehearse_rank
from meshwright.spec import (
    DataSpec,
    MemorySpec,
    ModelSpec,
    ParallelSpec,
    PrecisionSpec,
    RunSpec,
    ScheduleSpec,
    SyntheticSpec,
)
from meshwright.spec.families import family

SEGMENTS = "expandable_segments:True"
GIB = 2**30


@dataclass(frozen=True)
class Case:
    """One rank of one layout."""

    name: str
    family: str
    num_layers: int
    parallel: dict = field(default_factory=dict)
    rank: int = 0
    sequence_length: int = 4096
    microbatch_sequences: int = 1
    microbatches: int = 1
    recompute: str = "none"
    is_compiled: bool = False
    precision: dict = field(default_factory=lambda: {"compute": "bf16"})
    documents: str = "joined"

    def run(self, device: str, *, is_tiny: bool = False) -> RunSpec:
        """The run of the case; `is_tiny`: with small widths and sequences."""
        model = family(self.family).with_(num_layers=self.num_layers)
        length = self.sequence_length
        if is_tiny:
            model, length = tiny(model), 64
        parallel = ParallelSpec(**self.parallel)
        return RunSpec(
            device=device,
            compile=self.is_compiled,
            model=model,
            parallel=parallel,
            precision=PrecisionSpec(**self.precision),
            memory=MemorySpec(recompute=self.recompute),
            schedule=ScheduleSpec(num_steps=10),
            data=DataSpec(
                synthetic=SyntheticSpec(),
                sequence_length=length,
                batch_sequences=self.microbatches * self.microbatch_sequences * parallel.dp,
                microbatch_sequences=self.microbatch_sequences,
                documents=self.documents,
            ),
        )


def tiny(model: ModelSpec) -> ModelSpec:
    """The model with small widths."""
    attention = model.attention
    heads, groups = 16, 16 if attention.num_kv_heads == attention.num_heads else 8
    small = {"width": 64, "vocab_size": 512, "mlp": model.mlp.with_(width=128)}
    if attention.latent is None:
        small["attention"] = attention.with_(num_heads=heads, num_kv_heads=groups, head_width=16)
    if model.moe is not None:
        small["moe"] = model.moe.with_(width=64)
    return model.with_(**small)


FP8 = {"compute": "bf16", "fp8": "current"}
B1, B3, B8, MOE = "llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b", "qwen3-30b-a3b"
GPT2 = "gpt2-124m"
INTERLEAVED = {"pp": 4, "schedule": "interleaved_1f1b", "virtual_stages": 2}
CASES = [
    Case("1B alone", B1, 16, microbatch_sequences=2, microbatches=2),
    Case("1B alone, selective", B1, 16, microbatch_sequences=2, microbatches=2, recompute="selective"),
    Case("1B alone, full", B1, 16, microbatch_sequences=4, recompute="full"),
    Case("1B alone, separate documents", B1, 4, documents="separate"),
    Case("1B ZeRO-1 of 8", B1, 16, {"dp_shard": 8, "zero": 1}, microbatches=2),
    Case("1B ZeRO-2 of 8", B1, 16, {"dp_shard": 8, "zero": 2}, microbatches=2),
    Case("1B FSDP 8", B1, 16, {"dp_shard": 8, "zero": 3}, microbatch_sequences=2),
    Case("1B FSDP 64, 2 micro-batches", B1, 16, {"dp_shard": 64, "zero": 3}, rank=5, microbatches=2),
    Case("3B FSDP 8", B3, 14, {"dp_shard": 8, "zero": 3}, microbatch_sequences=2),
    Case("3B FSDP 64, selective", B3, 14, {"dp_shard": 64, "zero": 3}, recompute="selective"),
    Case("8B FSDP 8, full", B8, 12, {"dp_shard": 8, "zero": 3}, microbatch_sequences=2, recompute="full"),
    Case("8B FSDP 64", B8, 12, {"dp_shard": 64, "zero": 3}, rank=63),
    Case("1B tp 2", B1, 16, {"tp": 2}, rank=1, microbatches=2),
    Case("8B tp 8", B8, 16, {"tp": 8}, rank=3, microbatch_sequences=2),
    Case("8B FSDP 8 x tp 8, selective", B8, 16, {"dp_shard": 8, "zero": 3, "tp": 8}, recompute="selective"),
    Case("8B pp 4 1f1b, first", B8, 16, {"pp": 4}, microbatches=8),
    Case("8B pp 4 1f1b, second", B8, 16, {"pp": 4}, rank=1, microbatches=8),
    Case("8B pp 4 gpipe, last", B8, 16, {"pp": 4, "schedule": "gpipe"}, rank=3, microbatches=4),
    Case("8B pp 4 interleaved, first", B8, 16, INTERLEAVED, microbatches=8),
    Case("8B pp 4 zbv, first", B8, 16, {"pp": 4, "schedule": "zbv", "virtual_stages": 2}, microbatches=8),
    Case(
        "8B FSDP 8 x pp 4 1f1b, second", B8, 16, {"pp": 4, "dp_shard": 8, "zero": 3}, rank=8, microbatches=8
    ),
    Case("3B cp 4 gather", B3, 8, {"cp": 4}, rank=1, sequence_length=16384),
    Case("3B cp 4 ring", B3, 8, {"cp": 4, "cp_kind": "ring"}, rank=2, sequence_length=16384),
    Case("3B cp 4 ulysses", B3, 8, {"cp": 4, "cp_kind": "ulysses"}, sequence_length=16384),
    Case("30B MoE ep 8, FSDP", MOE, 4, {"dp_shard": 8, "ep": 8, "zero": 3}),
    Case("30B MoE ep 8, selective", MOE, 4, {"dp_shard": 8, "ep": 8, "zero": 3}, recompute="selective"),
    Case("1B fp8", B1, 16, precision=FP8, microbatch_sequences=2),
    Case("8B FSDP 8, fp8", B8, 12, {"dp_shard": 8, "zero": 3}, precision=FP8),
    Case("1B compiled", B1, 16, microbatch_sequences=2, is_compiled=True),
    Case("8B FSDP 8, compiled", B8, 12, {"dp_shard": 8, "zero": 3}, is_compiled=True),
    Case("1B, selective, compiled", B1, 16, microbatch_sequences=2, recompute="selective", is_compiled=True),
    Case("1B, 8 sequences, compiled", B1, 16, microbatch_sequences=8, is_compiled=True),
    Case(
        "1B, 8 sequences, selective, compiled",
        B1,
        16,
        microbatch_sequences=8,
        recompute="selective",
        is_compiled=True,
    ),
    Case("124M, compiled", GPT2, 12, sequence_length=1024, microbatch_sequences=64, is_compiled=True),
    Case("1B fp8, compiled", B1, 16, precision=FP8, microbatch_sequences=2, is_compiled=True),
    Case("8B, full, compiled", B8, 12, microbatch_sequences=2, recompute="full", is_compiled=True),
]


def closed_form(run: RunSpec, pp_rank: int) -> tuple[float, float]:
    """The planner's allocated and reserved bytes of this rank's stage."""
    at = one_layout(
        run.parallel,
        run.memory,
        microbatch_sequences=run.data.microbatch_sequences,
        num_microbatches=run.accumulation,
    )
    found = memory(workload_of(run), at, parse_cluster("h200:1"), runtime_of(run))
    stage = 0 if pp_rank == 0 else 2 if pp_rank == run.parallel.pp - 1 else 1
    return float(found.allocated_bytes[0, stage]), float(found.reserved_bytes[0, stage])


def traced(index: int, device: str, *, is_tiny: bool) -> dict:
    """Closed form and trace of one case, in a process of its own."""
    torch.set_num_threads(1)
    case = CASES[index]
    run = case.run(device, is_tiny=is_tiny)
    row: dict = {}
    try:
        pp_rank = case.rank // (run.parallel.num_ranks // run.parallel.pp)
        row["closed_allocated"], row["closed_reserved"] = closed_form(run, pp_rank)
        report = rehearse_rank(run, case.rank, extrapolate=False)
        row["traced_allocated"], row["traced_reserved"] = report.allocated_bytes, report.reserved_bytes
        row |= {"traced_seconds": report.seconds, "items": report.items, "form": report.form}
        row["peak_phase"] = report.peak_phase
    except Exception as error:  # a row with its error is a result, too
        traceback.print_exc()
        row["trace_error"] = _error_text(error)
    return row


def chosen(only: str) -> list[int]:
    """Indices of the cases whose name contains this text."""
    return [index for index, case in enumerate(CASES) if only in case.name]


def measure(indices: list[int], device: str, rows: Path, *, is_tiny: bool) -> None:
    """Measure these cases; each appends a line of JSON, so that a crash loses one case only."""
    for index in indices:
        with rows.open("a") as file:
            file.write(json.dumps({"index": index, "started": True}) + "\n")
        row: dict = {"index": index}
        started_at = time.perf_counter()
        try:
            found = measure_rank(CASES[index].run(device, is_tiny=is_tiny), CASES[index].rank)
            row |= {"allocated": found.allocated_bytes, "reserved": found.reserved_bytes}
            row |= {"step_seconds": found.step_seconds, "microbatch_seconds": found.microbatch_seconds}
        except Exception as error:
            traceback.print_exc()
            row["measure_error"] = _error_text(error)
        row["wall_seconds"] = time.perf_counter() - started_at
        with rows.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)
        if "CUDA error" in row.get("measure_error", "") or "illegal" in row.get("measure_error", ""):
            os._exit(3)  # the CUDA context is lost: the next case needs a new process
        gc.collect()
        torch.compiler.reset()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def measure_all(only: str, device: str, rows: Path, *, is_tiny: bool) -> dict[int, dict]:
    """Start the measuring process, and again after each case that kills it."""
    begin = 0
    found: dict[int, dict] = {}
    while begin < len(CASES):
        arguments = [
            sys.executable,
            "-m",
            "bench.rehearsal",
            "--measure-from",
            str(begin),
            "--rows",
            str(rows),
        ]
        arguments += ["--device", device, "--only", only] + (["--tiny"] if is_tiny else [])
        code = subprocess.run(arguments, env={**os.environ, "PYTORCH_ALLOC_CONF": SEGMENTS}).returncode
        lines = [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []
        found = {line["index"]: line for line in lines if "started" not in line}
        started = max((line["index"] for line in lines), default=begin)
        if started not in found:
            found[started] = {"index": started, "measure_error": f"the process ended with code {code}"}
            with rows.open("a") as file:
                file.write(json.dumps(found[started]) + "\n")
        if code == 0:
            break
        begin = started + 1
    return found


def _error_text(error: Exception) -> str:
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"[:200]


def table(rows: list[dict]) -> str:
    """One line of Markdown per case."""
    head = (
        "| case | rank | closed form | traced | measured | closed / measured | traced / measured "
        "| reserved traced | measured | traced / measured | closed / traced | ms per micro-batch |\n"
        "|---|---|---|---|---|---|---|---|---|---|---|---|\n"
    )
    return head + "\n".join(_line(row) for row in rows)


def _line(row: dict) -> str:
    def gib(name: str) -> str:
        return f"{row[name] / GIB:.2f}" if row.get(name) else ""

    def ratio(one: str, other: str) -> str:
        return f"{row[one] / row[other]:.4f}" if row.get(one) and row.get(other) else ""

    error = row.get("measure_error") or row.get("trace_error")
    cells = [
        row["name"] + (f" ({error})" if error else ""),
        str(row["rank"]),
        gib("closed_allocated"),
        gib("traced_allocated"),
        gib("allocated"),
        ratio("closed_allocated", "allocated"),
        ratio("traced_allocated", "allocated"),
        gib("traced_reserved"),
        gib("reserved"),
        ratio("traced_reserved", "reserved"),
        ratio("closed_allocated", "traced_allocated"),
        f"{1e3 * row['microbatch_seconds']:.1f}" if row.get("microbatch_seconds") else "",
    ]
    return "| " + " | ".join(cells) + " |"


def summary(rows: list[dict]) -> str:
    """Mean and worst errors, uncompiled and compiled."""

    def errors(one: str, other: str, chosen: list[dict]) -> str:
        values = [row[one] / row[other] - 1.0 for row in chosen if row.get(one) and row.get(other)]
        if not values:
            return "no rows"
        mean = statistics.mean(abs(value) for value in values)
        worst = max(values, key=abs)
        return f"mean {mean:.2%}, worst {worst:+.2%} over {len(values)} rows"

    def figures(kind: str, chosen: list[dict]) -> list[str]:
        return [
            f"- {kind}, traced against measured allocated: {errors('traced_allocated', 'allocated', chosen)}",
            f"- {kind}, traced against measured reserved: {errors('traced_reserved', 'reserved', chosen)}",
            f"- {kind}, closed form against measured: {errors('closed_allocated', 'allocated', chosen)}",
            f"- {kind}, closed form against traced: {errors('closed_allocated', 'traced_allocated', chosen)}",
        ]

    return "\n".join(
        [
            *figures("uncompiled", [row for row in rows if not row["is_compiled"]]),
            *figures("compiled", [row for row in rows if row["is_compiled"]]),
            *(f"- {row['name']}: {row['form']}" for row in rows if "as if" in row.get("form", "")),
        ]
    )


def write(rows: list[dict], out: Path, seconds: float) -> None:
    """Write the page, and the rows as JSON beside it."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    text = f"""# One rank of many layouts: predicted, traced, measured

`bench.rehearsal` on {name}, torch {torch.__version__}, Python {sys.version.split()[0]}, `{SEGMENTS}`, \
{seconds:.0f} s in all. Bytes are GiB as torch counts them, at the peak of a step after the first. Closed \
form is the planner's; traced is the rehearsal on the CPU with the same torch.

{table(rows)}

{summary(rows)}
"""
    out.write_text(text)
    out.with_suffix(".json").write_text(json.dumps(rows, indent=1))
    print(text)


def main() -> None:
    """Trace and measure all cases, or measure some of them as a child process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="Markdown file of the page")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small widths and sequences")
    parser.add_argument(
        "--workers", type=int, default=min(12, os.cpu_count() or 1), help="processes that trace"
    )
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--measure-from", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    options = parser.parse_args()
    indices = chosen(options.only)
    assert indices, f"no case's name contains {options.only!r}"
    if options.measure_from is not None:
        later = [index for index in indices if index >= options.measure_from]
        measure(later, options.device, options.rows, is_tiny=options.tiny)
        return
    assert options.out is not None, "--out names the result file"
    started_at = time.perf_counter()
    rows_file = options.out.with_suffix(".rows")
    rows_file.unlink(missing_ok=True)
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        waiting: list[Future] = [
            pool.submit(traced, index, options.device, is_tiny=options.tiny) for index in indices
        ]
        measured = measure_all(options.only, options.device, rows_file, is_tiny=options.tiny)
        rows = []
        for index, future in zip(indices, waiting, strict=True):
            case = CASES[index]
            row = {"name": case.name, "rank": case.rank, "is_compiled": case.is_compiled}
            try:
                row |= future.result(timeout=300)
            except Exception as error:
                row["trace_error"] = _error_text(error)
            rows.append(row | measured.get(index, {"measure_error": "not measured"}))
    write(rows, options.out, time.perf_counter() - started_at)
    rows_file.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
