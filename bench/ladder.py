"""The ablation ladder of our own step: what each technique adds to those before it.

    python -m bench.ladder --case 1b
    python -m bench.ladder --case tiny --device cpu     for a try

All rungs are measured in one process, one after the other, with micro-batches of half the size of the case's,
so that the baseline (no compiler, full logits) fits as well. A technique is switched off by patching, for the
measurement only: the product has no such switches.
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
from meshwright.bench.step import fill_on_device, make_steps, rates
from meshwright.bench.step_clock import StepClock
from meshwright.errors import MeshwrightError
from meshwright.mesh import Mesh, build_mesh, join_world, leave_world
from meshwright.models import decoder
from meshwright.spec import ParallelSpec, RunSpec
from meshwright.train.build import build_training
from meshwright.train.step import Training

# In the order in which they are added. `compile` and `fp8` are settings of the run; others are patched.
RUNGS = ("compile", "attention", "loss", "optimizer", "fp8")
_RUNG_TEXT = {
    "compile": "each block through torch.compile",
    "attention": "cuDNN's attention instead of flash",
    "loss": "head and loss in chunks instead of full fp32 logits",
    "optimizer": "fused update instead of one kernel per operation",
    "fp8": "matmuls in fp8",
}


def rungs_of(run: RunSpec) -> list[str]:
    """The rungs that this run has; with bf16 weights or Adam moments the update is always fused."""
    is_plain = run.precision.weights == "fp32" and run.optim.state == "fp32"
    absent = {"fp8": run.precision.fp8 is None, "optimizer": not is_plain, "compile": not run.compile}
    return [rung for rung in RUNGS if not absent.get(rung, False)]


def full_logits_loss(
    x_BSD: Tensor, weight_VD: Tensor, targets_BS: Tensor, weights_BS: Tensor, **_: object
) -> Tensor:
    """Head and cross-entropy over full fp32 logits."""
    logits_TV = functional.linear(x_BSD, weight_VD).flatten(0, -2).float()
    losses_T = functional.cross_entropy(logits_TV, targets_BS.flatten(), reduction="none")
    return (losses_T * weights_BS.flatten()).sum()


@contextmanager
def without_rungs(rungs: Collection[str]) -> Iterator[Callable[[Training], None]]:
    """Inside, these techniques are off; call the yielded function on the training once it is built."""

    def adjust(training: Training) -> None:
        if "optimizer" in rungs:
            _unfuse(training.optimizer)

    with ExitStack() as undone:
        if "attention" in rungs:
            torch.backends.cuda.enable_cudnn_sdp(False)
            undone.callback(torch.backends.cuda.enable_cudnn_sdp, True)
        if "loss" in rungs:
            undone.enter_context(patch.object(decoder, "linear_cross_entropy", full_logits_loss))
        yield adjust


def _unfuse(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["fused"], group["foreach"] = False, True
    for state in optimizer.state.values():
        if "step" in state:  # on the device it would cost a host sync per parameter
            state["step"] = state["step"].cpu()


# ---- the measurement ----------------------------------------------------------------------------


def climb(run: RunSpec) -> list[tuple[str, tuple[str, ...]]]:
    """One label per rung, from the baseline on, with the techniques that are still off."""
    rungs = rungs_of(run)
    baseline = ("baseline: none of the following", tuple(rungs))
    return [
        baseline,
        *((f"+ {rung}: {_RUNG_TEXT[rung]}", tuple(rungs[index + 1 :])) for index, rung in enumerate(rungs)),
    ]


def run_without(run: RunSpec, missing: Collection[str]) -> RunSpec:
    """The run of a rung: `compile` and `fp8` are settings."""
    kept = run.with_(compile=False) if "compile" in missing else run
    return kept.with_(precision=kept.precision.with_(fp8=None)) if "fp8" in missing else kept


def measure_rung(run: RunSpec, missing: Collection[str], mesh: Mesh, *, seconds: float) -> dict[str, Any]:
    """Time and memory of steps without some techniques."""
    asked = run_without(run, missing)
    clock = StepClock(mesh.device, seconds=seconds, warmup_steps=1, fewest_steps=3, is_profiled=False)
    with without_rungs(missing) as adjust:
        training = build_training(asked, mesh, fill=fill_on_device)
        adjust(training)
        make_steps(asked, mesh, training, clock)
    return {**machine_facts(mesh.device), **clock.result(), **rates(asked, clock.result())}


def precision_of(run: RunSpec, missing: Collection[str]) -> str:
    """The precision of a rung, by which the tolerance of its first loss is chosen."""
    return "fp8" if run_without(run, missing).precision.fp8 else "bf16"


def reset() -> None:
    """Free the memory and the compiled code of the last rung."""
    torch._dynamo.reset()  # Dynamo has no guard on the choice of attention kernel
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def measure(options: argparse.Namespace) -> int:
    """Measure every rung; one that runs out of memory is a row with its error."""
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
            reset()
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
    """The command line; options that `build_run` reads and the ladder does not offer are fixed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=tuple(CASES), default="1b")
    parser.add_argument(
        "--microbatch", type=int, help="sequences per micro-batch; by default half of the case's"
    )
    parser.add_argument("--accumulation", type=int, help="micro-batches per step; by default the case's")
    parser.add_argument("--seconds", type=float, default=1.5, help="length of a timed window")
    parser.add_argument("--tokens", type=int, default=1 << 21, help="random tokens of the dataset")
    parser.add_argument(
        "--set", action="append", default=[], help="override of the run, such as optim.lr=1e-3"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--eager", action="store_true", help="without the rung `compile`")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results", help="folder of the results"
    )
    return parser.parse_args(arguments, argparse.Namespace(precision="bf16", documents=None))


if __name__ == "__main__":
    # AOTAutograd's cache ignores the attention kernel. The setting is private: the public one is an
    # environment variable, which torch has read by now.
    try:
        with functorch_config.patch(enable_autograd_cache=False):
            sys.exit(measure(parse()))
    except MeshwrightError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
