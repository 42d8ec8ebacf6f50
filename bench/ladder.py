"""The ablation ladder of our own step: each rung is what one technique adds to the rungs below it.

    python bench/ladder.py --case 1b
    python bench/ladder.py --case tiny --device cpu     for a look

All rungs are measured in one process, one after the other, in micro-batches of half the size of the case's,
so that the ground (no compiler, whole logits) fits as well. A rung is taken away by undoing it from outside,
for a measurement only: the product has no such switches.
"""

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from bench.reports.ladder import write_ladder
from bench.reports.step import losses_agree, print_row
from bench.workloads.cases import CASES, FP8, build_run
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.nn import functional

from meshwright.bench.machine_facts import machine_facts
from meshwright.bench.random_tokens import write_random_tokens
from meshwright.bench.step import drawn_on, make_steps, rates
from meshwright.bench.step_clock import StepClock
from meshwright.errors import MeshwrightError
from meshwright.mesh import Mesh, build_mesh, join_world, leave_world
from meshwright.models import decoder
from meshwright.spec import ParallelSpec, RunSpec
from meshwright.train.build import build_training
from meshwright.train.step import Training

# From the ground up. `compile` and `fp8` are settings of the run; the others are undone here.
RUNGS = ("compile", "attention", "loss", "optimizer", "fp8")
_EXPLAINED = {
    "compile": "each block through torch.compile",
    "attention": "cuDNN's attention instead of flash",
    "loss": "head and loss in chunks instead of whole fp32 logits",
    "optimizer": "fused update instead of one kernel per operation",
    "fp8": "matrix products in fp8",
}


def rungs_of(run: RunSpec) -> list[str]:
    """The rungs that this run has; weights or moments in bf16 come with an update that is fused anyway."""
    is_plain = run.precision.weights == "fp32" and run.optim.state == "fp32"
    absent = {"fp8": run.precision.fp8 is None, "optimizer": not is_plain, "compile": not run.compile}
    return [rung for rung in RUNGS if not absent.get(rung, False)]


def explain(rung: str) -> str:
    return _EXPLAINED[rung]


def whole_loss(
    x_BSD: Tensor, weight_VD: Tensor, targets_BS: Tensor, weights_BS: Tensor, **_: object
) -> Tensor:
    """Head and cross-entropy as everyone writes them first."""
    wide_TV = functional.linear(x_BSD, weight_VD).flatten(0, -2).float()
    losses_T = functional.cross_entropy(wide_TV, targets_BS.flatten(), reduction="none")
    return (losses_T * weights_BS.flatten()).sum()


@contextmanager
def without_rungs(rungs: Collection[str]) -> Iterator[Callable[[Training], None]]:
    """Inside the block these rungs are gone; call what it yields on the training once it is built."""

    def adjust(training: Training) -> None:
        if "optimizer" in rungs:
            _unfuse(training.optimizer)

    with ExitStack() as undone:
        if "attention" in rungs:
            torch.backends.cuda.enable_cudnn_sdp(False)
            undone.callback(torch.backends.cuda.enable_cudnn_sdp, True)
        if "loss" in rungs:
            undone.enter_context(patch.object(decoder, "linear_cross_entropy", whole_loss))
        yield adjust


def _unfuse(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["fused"], group["foreach"] = False, True
    for state in optimizer.state.values():
        if "step" in state:  # on the device it would be waited for, parameter by parameter
            state["step"] = state["step"].cpu()


# ---- the measurement ----------------------------------------------------------------------------


def climb(run: RunSpec) -> list[tuple[str, tuple[str, ...]]]:
    """From the ground up: a label, and the rungs that are still missing."""
    rungs = rungs_of(run)
    ground = ("ground: none of what follows", tuple(rungs))
    return [
        ground,
        *((f"+ {rung}: {explain(rung)}", tuple(rungs[index + 1 :])) for index, rung in enumerate(rungs)),
    ]


def run_without(run: RunSpec, missing: Collection[str]) -> RunSpec:
    """The run file of a rung: two of them are settings."""
    kept = run.with_(compile=False) if "compile" in missing else run
    return kept.with_(precision=kept.precision.with_(fp8=None)) if "fp8" in missing else kept


def measure_rung(run: RunSpec, missing: Collection[str], mesh: Mesh, *, seconds: float) -> dict[str, Any]:
    """Time and memory of steps without some rungs."""
    asked = run_without(run, missing)
    clock = StepClock(mesh.device, seconds=seconds, warmup_steps=1, fewest_steps=3, is_profiled=False)
    with drawn_on(mesh.device), without_rungs(missing) as adjust:
        training = build_training(asked, mesh)
        adjust(training)
        make_steps(asked, mesh, training, clock)
    return {**machine_facts(mesh.device), **clock.result(), **rates(asked, clock.result())}


def precision_of(run: RunSpec, missing: Collection[str]) -> str:
    """By which the tolerance of a first loss is chosen."""
    return "fp8" if run_without(run, missing).precision.fp8 else "bf16"


def forget() -> None:
    """Give back what the last rung held; what was compiled for it may not fit the next."""
    torch._dynamo.reset()  # the choice of an attention kernel is no guard of its cache
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def measure(options: argparse.Namespace) -> int:
    """Every rung from the ground up; one that does not fit is told, and the next is tried."""
    case, started_at = CASES[options.case], time.perf_counter()
    options.microbatch = options.microbatch or max(1, case.microbatch // 2)
    overrides = FP8[case.fp8[0]] if case.fp8 else ()
    mesh = build_mesh(ParallelSpec(), join_world(options.device))
    with tempfile.TemporaryDirectory(prefix="bench-ladder-") as folder:
        data = Path(folder) / "tokens"
        write_random_tokens(data, vocab_size=case.model.vocab_size, num_tokens=options.tokens)
        run = build_run(case, options, data, overrides)
        rows: list[dict[str, Any]] = []
        for label, missing in climb(run):
            row: dict[str, Any] = {"kind": "rung", "peer": "ours", "label": label}
            row["precision"] = precision_of(run, missing)
            try:
                row |= measure_rung(run, missing, mesh, seconds=options.seconds)
            except torch.OutOfMemoryError as error:
                row["error"] = f"out of memory: {str(error).split('. ')[0]}"
            forget()
            rows.append(row)
            print_row(row)
            summary = {
                "options": {"case": options.case, "precision": "all"},
                "run": run.model_dump(mode="json"),
                "versions": {},
                "seconds": round(time.perf_counter() - started_at),
                "first_losses_agree": losses_agree(rows),
                "rows": rows,
            }
            write_ladder(summary, options.out)
    leave_world()
    return 0


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; what `build_run` reads and the ladder does not offer is fixed."""
    parser = argparse.ArgumentParser(description="What each technique adds to our own step.")
    parser.add_argument("--case", choices=tuple(CASES), default="1b")
    parser.add_argument("--microbatch", type=int, help="sequences; half of the case's by itself")
    parser.add_argument("--accumulation", type=int)
    parser.add_argument("--seconds", type=float, default=1.5, help="length of a timed window")
    parser.add_argument("--tokens", type=int, default=1 << 21, help="random tokens to train on")
    parser.add_argument("--set", action="append", default=[], help="an override, like optim.lr=1e-3")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--eager", action="store_true", help="without the rung of the compiler")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    return parser.parse_args(arguments, argparse.Namespace(precision="bf16"))


if __name__ == "__main__":
    # AOTAutograd's cached graphs do not know for which attention kernel they were made. A private setting:
    # the public one is an environment variable, which torch has read by now.
    try:
        with functorch_config.patch(enable_autograd_cache=False):
            sys.exit(measure(parse()))
    except MeshwrightError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
