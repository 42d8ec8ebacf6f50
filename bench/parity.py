"""Loss parity: the 124M shape in fp32, bf16 and fp8 on the same data, several seeds each, and a control.

    python -m bench.parity                         on a GPU: three to four minutes
    python -m bench.parity --tiny --device cpu     the same program in a minute or two, for a try
    python -m bench.parity --kinds bf16 current blockwise --seeds 0 1

A number format must not cost more than another seed does. A seed decides initial weights and the order of the
samples; the text (bench/workloads/library_text.py) and its held-out part are the same for all. For each kind
the gap to bf16 of the same seed is averaged over the seeds: of the loss over the last fifth of the steps, and
of the held-out loss. Both must stay within the spread of bf16: its largest loss over five seeds minus its
smallest. The control (E5M2 everywhere, without bf16 ends, with stale scales) must not. `fp32` computes
matmuls in TF32 where the device has it.

Each kind has a process of its own, which compiles once for all its seeds. The processes share the device:
nothing is timed here, and one such run cannot fill it.
"""

import argparse
import dataclasses
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from unittest.mock import patch

import torch
from bench.reports.parity import Curve, verdict_lines, write_results
from bench.workloads.library_text import write_library

from meshwright.bench.machine_facts import machine_facts
from meshwright.errors import EXIT_INTERRUPTED, EXIT_RUN_FAILED, MeshwrightError, SpecError
from meshwright.mesh import Mesh, build_mesh, choose_device, join_world, leave_world
from meshwright.optim.schedule import learning_rate
from meshwright.parallel.fp8 import fp8_sites
from meshwright.precision.fp8.recipes import E5M2, RECIPES
from meshwright.spec import (
    DataSpec,
    Fp8Spec,
    ModelSpec,
    OptimSpec,
    ParallelSpec,
    PrecisionSpec,
    RunSpec,
    ScheduleSpec,
)
from meshwright.spec.check import require_valid
from meshwright.spec.families import family
from meshwright.train.build import build_data, build_training, seed_step
from meshwright.train.evaluate import evaluate
from meshwright.train.step import Training, train_step

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("fp32", "bf16", "current", "delayed", "blockwise", "mxfp8", "control")
# Within E5M2's range this leaves a few distinct values for the largest numbers, and zero for the rest.
STALE_BY = 2.0**30
DEFAULT_KINDS = ("bf16", "fp32", "current", "control")
# Compiled forms of one block: a model per seed, in training and evaluation; torch's default limit is lower.
MOST_VARIANTS = 64
# Batches of the held-out loss.
HELD_OUT_BATCHES = 16


def model_of(*, is_tiny: bool) -> ModelSpec:
    """GPT-2's smallest shape with a padded vocabulary; `is_tiny`: a smaller one for a CPU."""
    model = family("gpt2-124m").with_(vocab_size=50304)
    if not is_tiny:
        return model
    small = model.attention.with_(num_heads=2, num_kv_heads=2, head_width=64)
    inner = model.mlp.with_(width=256)
    return model.with_(num_layers=3, width=128, vocab_size=384, max_positions=128, attention=small, mlp=inner)


def precision_of(kind: str, device: str) -> PrecisionSpec:
    """The precision of one kind of run."""
    if kind == "fp32":
        return PrecisionSpec(compute="fp32" if device == "cpu" else "tf32")
    if kind == "bf16":
        return PrecisionSpec(compute="bf16")
    fp8 = {"recipe": "delayed", "bf16_layers_each_end": 0} if kind == "control" else {"recipe": kind}
    return PrecisionSpec(compute="bf16", fp8=Fp8Spec.model_validate(fp8))


def run_of(kind: str, seed: int, options: argparse.Namespace) -> RunSpec:
    """The run of one kind and seed; the seed decides initial weights and the order of samples."""
    return RunSpec(
        name=f"{kind}-{seed}",
        seed=seed,
        device=options.device,
        compile=options.device == "cuda",
        model=model_of(is_tiny=options.tiny),
        precision=precision_of(kind, options.device),
        optim=OptimSpec(lr=options.lr, max_grad_norm=1.0, weight_decay=0.1, beta2=0.95),
        schedule=ScheduleSpec(num_steps=options.steps, warmup_steps=options.steps // 10, kind="cosine"),
        data=DataSpec(
            path=str(options.data),
            sequence_length=options.sequence,
            batch_sequences=options.batch,
            microbatch_sequences=options.batch,
            documents="joined",
            holdout_sequences=HELD_OUT_BATCHES * options.batch,
        ),
    )


def train_curve(kind: str, run: RunSpec, mesh: Mesh) -> Curve:
    """Train one run: the loss of every step, and the held-out loss at the end."""
    started_at = time.perf_counter()
    with ExitStack() as stack:
        if kind == "control":
            crude = dataclasses.replace(RECIPES["delayed"], operand=E5M2, gradient=E5M2)
            stack.enter_context(patch.dict(RECIPES, {"delayed": crude}))
        training, batches = build_training(run, mesh), build_data(run, mesh)
        if kind == "control":
            emulate(training)
        losses = []
        for step in range(run.schedule.num_steps):
            seed_step(run.seed, step)
            rate = learning_rate(run.optim, run.schedule, step, batch_tokens=run.data.batch_tokens)
            losses.append(train_step(training, next(batches), learning_rate=rate).loss)
            if kind == "control" and step == 0:
                freeze_scales(training)
        batches.close()
        held_out = evaluate(run, training.program, mesh)
    return Curve(
        kind=kind,
        seed=run.seed,
        losses=torch.stack(losses).tolist(),
        held_out=held_out,
        seconds=time.perf_counter() - started_at,
    )


def emulate(training: Training) -> None:
    """Compute fp8 matmuls in emulation: no tensor core multiplies E5M2 by E5M2."""
    for site in fp8_sites(training.program.stages):
        site.matmul.options = site.matmul.options._replace(native=False)


def freeze_scales(training: Training) -> None:
    """From now on use stale scales, as of a time when everything was STALE_BY times larger."""
    training.fp8_scales = None
    for site in fp8_sites(training.program.stages):
        scales = site.matmul.scales
        assert scales is not None and scales.has_history
        for scale in (scales.scale_x, scales.scale_weight, scales.scale_gradient):
            scale.mul_(STALE_BY)


# ---- processes ----------------------------------------------------------------------------------


def train_kind(kind: str, options: argparse.Namespace) -> None:
    """Train all seeds of one kind in this process; writes one line of JSON per seed."""
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    mesh = build_mesh(ParallelSpec(), join_world(options.device))
    torch._dynamo.config.recompile_limit = MOST_VARIANTS
    for seed in seeds_of(kind, options):
        curve = train_curve(kind, require_valid(run_of(kind, seed, options)), mesh)
        lines.write(json.dumps(dataclasses.asdict(curve)) + "\n")
        lines.flush()
        gc.collect()
    leave_world()


def seeds_of(kind: str, options: argparse.Namespace) -> list[int]:
    """The seeds of a kind; bf16 has more, since three hardly show the spread."""
    return options.base_seeds if kind == "bf16" else options.seeds


def start(kind: str, data: Path) -> subprocess.Popen[str]:
    """Start the process of a kind; it writes lines of JSON, and its log to a file."""
    environment = {"TORCHINDUCTOR_COMPILE_THREADS": "4", **os.environ}
    command = [sys.executable, "-m", "bench.parity", *sys.argv[1:], "--kind", kind, "--data", str(data)]
    with log_of(kind, data).open("w") as log:
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment, cwd=ROOT
        )


def log_of(kind: str, data: Path) -> Path:
    """The log file of a kind's process."""
    return data.parent / f"{kind}.log"


def follow(kind: str, data: Path, child: subprocess.Popen[str], curves: SimpleQueue[Curve | str]) -> None:
    """Put the curves of a kind into the queue as they arrive, or its error."""
    assert child.stdout is not None
    for line in child.stdout:
        curves.put(Curve(**json.loads(line)))
    if child.wait() != 0:
        log = log_of(kind, data)
        lines = log.read_text().strip().splitlines() if log.exists() else []
        curves.put(f"{kind}: {(lines or ['ended without output'])[-1][:300]}")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; default sizes depend on --tiny."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(DEFAULT_KINDS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="seeds of the other kinds")
    parser.add_argument("--base-seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4], help="seeds of bf16")
    parser.add_argument("--at-once", type=int, default=4, help="processes at the same time")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small model, for a CPU")
    for name in ("steps", "batch", "sequence"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--lr", type=float)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results", help="folder of the results"
    )
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    parser.add_argument("--data", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    sizes = {"steps": 100, "batch": 4, "sequence": 128, "lr": 1e-3}
    if not options.tiny:
        sizes = {"steps": 500, "batch": 6, "sequence": 1024, "lr": 6e-4}
    for name, size in sizes.items():
        setattr(options, name, getattr(options, name) or size)
    return options


def arriving_curves(options: argparse.Namespace) -> Iterator[Curve | str]:
    """The curves of all kinds as they are ready; a text for a kind that failed."""
    missing = {kind: len(seeds_of(kind, options)) for kind in options.kinds}
    arriving: SimpleQueue[Curve | str] = SimpleQueue()
    waiting, children = list(options.kinds), {}
    try:
        while any(missing.values()):
            busy = [kind for kind in children if missing[kind]]
            for kind in waiting[: options.at_once - len(busy)]:
                waiting.remove(kind)
                children[kind] = start(kind, options.data)
                arguments = (kind, options.data, children[kind], arriving)
                Thread(target=follow, args=arguments, daemon=True).start()
            curve = arriving.get()
            if isinstance(curve, str):
                missing[curve.split(":")[0]] = 0
            else:
                missing[curve.kind] -= 1
            yield curve
    finally:
        for child in children.values():
            child.kill()


def train_all(options: argparse.Namespace, text: dict[str, float]) -> bool:
    """Train every kind and seed; the page is written after each, so that an interrupted run leaves one."""
    facts = machine_facts(choose_device(options.device, 0))
    facts |= {"run": run_of("bf16", 0, options).model_dump(mode="json"), **text}
    name = "parity_tiny" if options.tiny else "parity"
    curves: list[Curve] = []
    is_sound, is_complete = False, True
    for curve in arriving_curves(options):
        if isinstance(curve, str):  # the others go on
            sys.stderr.write(f"error: {curve}\n")
            is_complete = False
            continue
        curves.append(curve)
        sys.stderr.write(
            f"{curve.kind:8} seed {curve.seed}: loss {curve.last:.4f}, held out {curve.held_out:.4f}, "
            f"{curve.seconds:.1f} s\n"
        )
        is_sound = write_results(curves, facts, options.out, name=name)
    if any(curve.kind == "bf16" for curve in curves):
        print("\n".join(verdict_lines(curves)))
    return is_sound and is_complete


def main() -> int:
    """Write the dataset and train; SIGTERM ends the child processes as well."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_INTERRUPTED))
    options = parse()
    if options.kind:
        train_kind(options.kind, options)
        return 0
    if "bf16" not in options.kinds:
        raise SpecError("bf16 is missing", where="--kinds", hint="add bf16: all kinds are compared with it")
    started_at = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="bench-parity-") as folder:
        options.data = Path(folder) / "tokens"
        num_tokens = (options.steps + HELD_OUT_BATCHES + 1) * options.batch * (options.sequence + 1)
        vocab_size = model_of(is_tiny=options.tiny).vocab_size
        is_sound = train_all(
            options, write_library(options.data, vocab_size=vocab_size, num_tokens=num_tokens)
        )
    sys.stderr.write(f"{time.perf_counter() - started_at:.0f} s\n")
    return 0 if is_sound else EXIT_RUN_FAILED


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MeshwrightError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
