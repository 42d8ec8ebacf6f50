"""A whole training step, ours and the peers', in one run on the same weights, tokens, batch and precision.

    python bench/step.py --case 1b                        us and every peer that is installed, A-B-A-B
    python bench/step.py --case 1b --only ours --profile  for tuning: time by kernel class
    python bench/step.py --case 1b --only ours --ladder   what each technique adds
    python bench/step.py --case 8b --precision fp8 --set precision.fp8=delayed

Every contender runs in a process of its own, one at a time. The loss of the first step must agree; then steps
are timed by device events: data fetch, copy to the device, forward, backward, clipping and update. Results go
to bench/results as JSON, a page and a picture. Compiled code is cached between processes and runs.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from bench.contender import Job, contend, missing_packages
from bench.ladder import explain, rungs_of
from bench.step_results import print_row, write_results

from meshwright.bench.kernel_time import KernelBudget, show_budget
from meshwright.bench.machine_facts import machine_facts
from meshwright.bench.random_tokens import write_random_tokens
from meshwright.bench.step import rates
from meshwright.bench.step_clock import StepClock
from meshwright.errors import EXIT_RUN_FAILED, MeshwrightError, SpecError
from meshwright.mesh import choose_device
from meshwright.spec import (
    AttentionSpec,
    DataSpec,
    MlpSpec,
    ModelSpec,
    OptimSpec,
    PrecisionSpec,
    RopeSpec,
    RunSpec,
    ScheduleSpec,
)
from meshwright.spec.families import family
from meshwright.spec.text import dump_run, parse_run

ROOT = Path(__file__).resolve().parents[1]
CONTENDERS = ("ours", "hf", "lightning", "plain")
# bf16 rounds each of some hundred operations differently per implementation; fp8 has three bits of fraction.
LOSS_TOLERANCE = {"bf16": 1e-3, "fp8": 5e-3, "fp32": 1e-5}
DATA_TOKENS = 1 << 22


@dataclass(frozen=True)
class Case:
    """A model and a batch that everyone computes."""

    model: ModelSpec
    sequence_length: int
    microbatch: int
    peer_weights: str = "fp32"
    """bf16: what fits with peers that have no exact small master; their row says so."""
    ours: tuple[str, ...] = ()
    """Settings of ours."""


def _tiny(kind: str) -> ModelSpec:
    if kind == "gpt":
        return (
            family("gpt2-124m")
            .with_(num_layers=3, width=64, vocab_size=512, max_positions=64)
            .with_(
                attention=family("gpt2-124m").attention.with_(num_heads=2, num_kv_heads=2, head_width=32),
                mlp=family("gpt2-124m").mlp.with_(width=256),
            )
        )
    return ModelSpec(
        vocab_size=512,
        num_layers=3,
        width=64,
        max_positions=64,
        attention=AttentionSpec(num_heads=4, num_kv_heads=2, head_width=16),
        mlp=MlpSpec(width=128),
        rope=RopeSpec(),
    )


# 10 bytes per parameter: weights and their lower bits, gradients and two moments, two bytes each.
_SMALL_STATE = ("precision.weights=bf16_exact", "precision.gradients=bf16", "optim.state=bf16")
CASES = {
    # The vocabulary is padded from 50257 to a multiple of 128, for everyone.
    "124m": Case(family("gpt2-124m").with_(vocab_size=50304), 1024, 64),
    "1b": Case(family("llama-3.2-1b"), 4096, 8),
    "8b": Case(family("llama-3.1-8b"), 4096, 2, peer_weights="bf16", ours=_SMALL_STATE),
    "tiny": Case(_tiny("llama"), 64, 2),
    "tiny-gpt": Case(_tiny("gpt"), 64, 2),
}
# The best found for each peer, and what its documentation shows first.
BEST: dict[str, dict[str, Any]] = {
    "ours": {},
    "hf": {"compile": True, "output": "loss", "optimizer": "fused"},
    "lightning": {"compile": True, "optimizer": "default"},  # it refuses to clip for a fused one
    "plain": {"compile": True, "optimizer": "fused"},
}
DOCUMENTED = {
    "hf": {"compile": False, "output": "full", "optimizer": "default"},
    "lightning": {"compile": False, "optimizer": "default"},
}
SWEEP = {
    "hf": [
        DOCUMENTED["hf"],
        {"compile": False, "output": "loss", "optimizer": "fused"},
        {"compile": True, "output": "full", "optimizer": "fused"},
        {"compile": True, "output": "loss", "optimizer": "fused"},
        {"compile": True, "output": "loss", "optimizer": "fused", "attention": "flex_attention"},
        {"compile": True, "output": "loss", "optimizer": "fused", "recompute": True},
    ],
    "lightning": [DOCUMENTED["lightning"], BEST["lightning"]],
    "plain": [{"compile": False, "optimizer": "fused"}, BEST["plain"]],
}


def build_run(case: Case, options: argparse.Namespace, data: Path) -> RunSpec:
    """The run file that ours trains from; peers read model, batch and optimizer out of it."""
    microbatch = options.microbatch or case.microbatch
    run = RunSpec(
        name=f"bench-{options.case}",
        device=options.device,
        compile=not options.eager,
        model=case.model,
        precision=PrecisionSpec(compute="fp32" if options.precision == "fp32" else "bf16"),
        optim=OptimSpec(lr=1e-4),
        schedule=ScheduleSpec(num_steps=100_000, kind="constant"),
        data=DataSpec(
            path=str(data),
            sequence_length=case.sequence_length,
            batch_sequences=microbatch * options.accumulation,
            microbatch_sequences=microbatch,
            documents="joined",
            shuffle=False,
        ),
    )
    overrides = [*case.ours, *(["precision.fp8=current"] if options.precision == "fp8" else [])]
    return parse_run(dump_run(run), [*overrides, *options.set]).require_valid()


# ---- one contender in a process of its own ------------------------------------------------------


def run_child(request: dict[str, Any], *, timeout_seconds: float) -> dict[str, Any]:
    """Start a contender and wait; a failure is a row that says so."""
    with tempfile.TemporaryDirectory(prefix="bench-child-") as folder:
        asked, answer = Path(folder) / "request.json", Path(folder) / "answer.json"
        asked.write_text(json.dumps(request))
        environment = {
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
            "TORCHINDUCTOR_CACHE_DIR": str(Path(tempfile.gettempdir()) / "bench-inductor-cache"),
            "TOKENIZERS_PARALLELISM": "false",
            **os.environ,
        }
        command = [sys.executable, str(Path(__file__).resolve()), "--child", str(asked), str(answer)]
        started_at = time.perf_counter()
        try:
            finished = subprocess.run(
                command, env=environment, cwd=ROOT, timeout=timeout_seconds, capture_output=True, text=True
            )
            words = finished.stderr.strip().splitlines()
        except subprocess.TimeoutExpired:
            words = [f"not finished after {timeout_seconds:.0f} s"]
        row = (
            json.loads(answer.read_text())
            if answer.exists()
            else {"error": _last_words(words), "words": words[-40:]}
        )
    kept = {key: request[key] for key in ("contender", "settings", "label")}
    return {**kept, **row, "process_seconds": time.perf_counter() - started_at}


def _last_words(lines: list[str]) -> str:
    told = [line for line in lines if re.match(r"\w*(\.\w+)*(Error|Exception)\b", line)]
    return (told or lines or ["the process ended without a word"])[-1][:300]


def child(asked: Path, answer: Path) -> None:
    """What runs in the contender's process."""
    request = json.loads(asked.read_text())
    run = RunSpec.model_validate(request["run"])
    device = choose_device(run.device, 0)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(run.seed)
    clock = StepClock(device, seconds=request["seconds"], warmup_steps=request["warmup_steps"])
    try:
        contend(request["contender"], Job(run, device, request["settings"]), clock)
        result = clock.result()
        row = {**machine_facts(device), **result, **rates(run, result)}
    except torch.OutOfMemoryError as error:
        row = {"error": f"out of memory: {str(error).split('. ')[0]}"}
    answer.write_text(json.dumps(row))


# ---- the plan of a measurement ------------------------------------------------------------------


def contenders_of(options: argparse.Namespace) -> list[str]:
    """Who takes part; an absent peer is told in a line."""
    names = options.only.split(",") if options.only else list(CONTENDERS)
    unknown = [name for name in names if name not in CONTENDERS]
    if unknown:
        raise SpecError(
            f"no contender is called {unknown[0]!r}",
            where="--only",
            hint=f"known are {', '.join(CONTENDERS)}",
        )
    present = []
    for name in names:
        missing = missing_packages(name)
        if missing:
            print(f"{name}: skipped, {' and '.join(missing)} not installed", flush=True)
        elif name != "ours" and options.precision == "fp8":
            print(f"{name}: skipped, has no fp8 without further packages", flush=True)
        else:
            present.append(name)
    return present


def requests_of(options: argparse.Namespace, names: list[str], run: RunSpec, case: Case) -> list[dict]:
    """Everything to be run, in order: the ladder, or rounds of all contenders, then documented defaults."""
    if options.ladder:
        return [_request(options, run, "ours", *rung) for rung in ladder(run)]
    eager = {"compile": False} if options.eager else {}
    best = {name: {**BEST[name], **_weights_of(name, case), **eager} for name in names}
    if options.sweep:
        best = {name: sweep(options, run, name, case) for name in names}
    rounds = [_request(options, run, name, name, best[name]) for _ in range(options.rounds) for name in names]
    documented = [
        _request(options, run, name, f"{name}, documented", {**DOCUMENTED[name], **_weights_of(name, case)})
        for name in names
        if name in DOCUMENTED and options.documented
    ]
    return rounds + documented


def _weights_of(name: str, case: Case) -> dict[str, Any]:
    return {} if name == "ours" else {"weights": case.peer_weights}


def _request(options: argparse.Namespace, run: RunSpec, contender: str, label: str, settings: dict) -> dict:
    without = settings.get("without", ())
    said = run.with_(compile=False) if "compile" in without else run
    if "fp8" in without:
        said = said.with_(precision=said.precision.with_(fp8=None))
    if "microbatch" in settings:
        data = said.data.with_(
            batch_sequences=settings["microbatch"] * run.accumulation,
            microbatch_sequences=settings["microbatch"],
        )
        said = said.with_(data=data)
    return {
        "contender": contender,
        "label": label,
        "settings": settings,
        "run": said.model_dump(mode="json"),
        "seconds": options.seconds_per_contender,
        "warmup_steps": options.warmup_steps,
    }


def ladder(run: RunSpec) -> list[tuple[str, dict[str, Any]]]:
    """From the ground up: what each rung adds to those below it."""
    rungs = rungs_of(run)
    ground = ("ground: none of what follows", {"without": list(rungs)})
    climbed = [
        (f"+ {rung}: {explain(rung)}", {"without": list(rungs[index + 1 :])})
        for index, rung in enumerate(rungs)
    ]
    return [ground, *climbed]


def sweep(options: argparse.Namespace, run: RunSpec, name: str, case: Case) -> dict[str, Any]:
    """Try every variation of a peer shortly; the fastest goes on, and all rows are kept."""
    variations = SWEEP.get(name, [{}])
    sizes = [int(text) for text in options.sweep_microbatches.split(",") if text] or [None]
    tried = []
    for variation in variations:
        for size in sizes:
            settings = {**variation, **_weights_of(name, case), **({"microbatch": size} if size else {})}
            request = _request(options, run, name, f"sweep {name}", settings)
            row = run_child({**request, "seconds": 2.0}, timeout_seconds=options.timeout)
            print_row(row)
            tried.append(row)
            options.sweep_rows.append(row)
    working = [row for row in tried if "error" not in row]
    return max(working, key=lambda row: row["tokens_per_second"])["settings"] if working else BEST[name]


def losses_agree(rows: list[dict[str, Any]], precision: str) -> bool:
    """Whether all first losses are within the tolerance of the first one, over rows of equal batch."""
    losses = [
        row["first_loss"] for row in rows if "first_loss" in row and "microbatch" not in row["settings"]
    ]
    return all(abs(loss - losses[0]) <= LOSS_TOLERANCE[precision] * abs(losses[0]) for loss in losses)


def measure(options: argparse.Namespace) -> int:
    case = CASES[options.case]
    choose_device(options.device, 0)  # a device that is not there is told before anything is started
    options.sweep_rows = []
    with tempfile.TemporaryDirectory(prefix="bench-data-") as parent:
        data = Path(parent) / "tokens"
        microbatch_tokens = (options.microbatch or case.microbatch) * case.sequence_length
        num_tokens = max(DATA_TOKENS, 4 * microbatch_tokens * options.accumulation)
        if options.case.startswith("tiny"):
            num_tokens = 1 << 16
        write_random_tokens(data, vocab_size=case.model.vocab_size, num_tokens=num_tokens)
        run = build_run(case, options, data)
        names = contenders_of(options)
        rows: list[dict[str, Any]] = []
        for request in requests_of(options, names, run, case):
            rows.append(run_child(request, timeout_seconds=options.timeout))
            print_row(rows[-1])
            if options.profile and rows[-1].get("kernel_seconds"):
                print_profile(rows[-1])
            # After every row, so that a measurement that is cut short leaves what it has.
            write_results(_summary(options, case, run, rows), options.out)
    summary = _summary(options, case, run, rows)
    if not summary["first_losses_agree"]:
        print("error: the first losses differ: the contenders did not compute the same", file=sys.stderr)
        return EXIT_RUN_FAILED
    return 0 if any("error" not in row for row in rows) else EXIT_RUN_FAILED


def _summary(
    options: argparse.Namespace, case: Case, run: RunSpec, rows: list[dict[str, Any]]
) -> dict[str, Any]:
    told = {key: value for key, value in vars(options).items() if key not in ("child", "sweep_rows", "out")}
    return {
        "options": told,
        "case": asdict(case) | {"model": case.model.model_dump(mode="json")},
        "run": run.model_dump(mode="json"),
        "first_losses_agree": losses_agree([*rows, *options.sweep_rows], options.precision),
        "rows": rows,
        "sweep": options.sweep_rows,
    }


def print_profile(row: dict[str, Any]) -> None:
    whole = sum(row["kernel_seconds"].values())
    budget = KernelBudget(whole, row["kernel_seconds"], [tuple(each) for each in row["largest_kernels"]])
    print(show_budget(budget, num_largest=25), flush=True)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", default="1b", help=f"one of {', '.join(CASES)}")
    parser.add_argument("--precision", choices=("bf16", "fp8", "fp32"), default="bf16")
    parser.add_argument("--microbatch", type=int, help="sequences of a micro-batch; the case has its own")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--only", help="contenders, comma-separated: ours,hf,lightning,plain")
    parser.add_argument("--set", action="append", default=[], help="ours: an override, like optim.lr=1e-3")
    parser.add_argument("--eager", action="store_true", help="everyone without torch.compile")
    parser.add_argument("--ladder", action="store_true", help="ours: what each technique adds")
    parser.add_argument("--profile", action="store_true", help="print the time of a step by kernel class")
    parser.add_argument("--sweep", action="store_true", help="try each peer's settings before the rounds")
    parser.add_argument("--sweep-microbatches", default="", help="sizes to try, like 4,8,16")
    parser.add_argument("--documented", action="store_true", help="also each peer as its documents show it")
    parser.add_argument("--rounds", type=int, default=2, help="2 is A-B-A-B")
    parser.add_argument("--seconds-per-contender", type=float, default=6.0, help="length of a timed window")
    parser.add_argument("--warmup-steps", type=int, default=4)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds before a contender is ended")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results", help="where results are written")
    parser.add_argument("--child", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.case not in CASES:
        raise SpecError(
            f"no case is called {options.case!r}", where="--case", hint=f"known are {', '.join(CASES)}"
        )
    return options


def main() -> int:
    try:
        options = parse()
        if options.child:
            child(*options.child)
            return 0
        return measure(options)
    except MeshwrightError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
