"""A training step of ours and of other frameworks, on the same weights, tokens, batch and precision.

    python -m bench.step --case 1b                  ours and every installed peer: sweep, then A-B-A-B
    python -m bench.step --case 124m,1b,8b          several cases; later ones compile meanwhile
    python -m bench.step --case 1b --only ours --precision bf16 --profile      time by class of kernel
    python -m bench.step --case 1b --documents 512  separate documents, 512 tokens on average, all contenders
    python -m bench.step --case tiny --device cpu   the same program in a minute, for a try

Every contender with each of its settings has a process of its own, which stays alive (bench/interleaved) and
is timed in windows: by device events, over data fetch, copy to the device, forward, backward, clipping and
update. The losses of the first steps must agree. Results go to bench/results as JSON, a page and a chart,
which are written again after every window. `bench.ladder` measures what each technique adds.
"""

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.contenders.registry import CONTENDERS, notes_of
from bench.interleaved.entries import entries_of
from bench.interleaved.process import GIB, ContenderProcess
from bench.interleaved.schedule import InterleavedSchedule, Pace
from bench.reports.step import losses_agree, print_row, write_results
from bench.workloads.cases import CASES, build_run

from meshwright.bench.kernel_time import KernelBudget, show_budget
from meshwright.bench.machine_facts import package_versions
from meshwright.bench.random_tokens import write_random_tokens
from meshwright.bench.step import rates
from meshwright.errors import EXIT_INTERRUPTED, EXIT_RUN_FAILED, MeshwrightError, SpecError
from meshwright.mesh import choose_device
from meshwright.spec import RunSpec

ROOT = Path(__file__).resolve().parents[1]
DATA_TOKENS = 1 << 22
# Device memory that is not available to contenders, and the error of the estimates.
SPARE_GIB = 2.5
PACKAGES = ("transformers", "accelerate", "pytorch_lightning", "torchtitan", "triton")


class Results:
    """The rows of one case; all files are written again after each row."""

    def __init__(self, name: str, options: argparse.Namespace, run: RunSpec) -> None:
        self._name, self._options, self._run = name, options, run
        self._started_at = time.perf_counter()
        self.rows: list[dict[str, Any]] = []

    def add(self, kind: str, process: ContenderProcess) -> None:
        """Add the latest window of a contender, or its error."""
        self.rows.append(row_of(kind, process))
        print_row(self.rows[-1])
        if self._options.profile and self.rows[-1].get("kernel_seconds"):
            print_profile(self.rows[-1])
        write_results(self.summary(), self._options.out)

    @property
    def is_sound(self) -> bool:
        """Whether the losses of all first steps agree."""
        return losses_agree(self.rows)

    def summary(self) -> dict[str, Any]:
        """The JSON document of the case."""
        kept = {key: value for key, value in vars(self._options).items() if key != "out"}
        return {
            "options": {**kept, "case": self._name},
            "run": self._run.model_dump(mode="json"),
            "versions": package_versions(PACKAGES),
            "notes": notes_of(self._options),
            "seconds": round(time.perf_counter() - self._started_at),
            "first_losses_agree": self.is_sound,
            "rows": [row for row in self.rows if row["kind"] != "sweep"],
            "sweep": [row for row in self.rows if row["kind"] == "sweep"],
        }


def row_of(kind: str, process: ContenderProcess) -> dict[str, Any]:
    """The row of a contender's latest window, with its rates; or its error and the end of its log."""
    run = RunSpec.model_validate(process.entry.run)
    precision = "fp8" if run.precision.fp8 else run.precision.compute
    row = {"kind": kind, "precision": precision, **process.entry.facts}
    if process.error is not None:
        return {**row, "error": process.error, "log_tail": process.log_tail}
    timing = process.timings[-1]
    factor = timing["accumulation_factor"]
    if factor > 1:
        row["label"] += f", {factor * run.accumulation} micro-batches per step"
    data = run.data.with_(batch_sequences=run.data.batch_sequences * factor)
    return {**row, **process.facts, **timing, **rates(run.with_(data=data), timing)}


def print_profile(row: dict[str, Any]) -> None:
    """Print the time of a step by class of kernel."""
    total = sum(row["kernel_seconds"].values())
    budget = KernelBudget(total, row["kernel_seconds"], [tuple(each) for each in row["largest_kernels"]])
    print(show_budget(budget, num_largest=25), flush=True)


def device_bytes(options: argparse.Namespace) -> int:
    """Device memory that contenders may share; without a GPU there is no limit."""
    if options.budget_gib:
        return int(options.budget_gib * GIB)
    if choose_device(options.device, 0).type != "cuda":
        return sys.maxsize
    asked = ["nvidia-smi", "--id=0", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    mebibytes = float(subprocess.run(asked, capture_output=True, text=True, check=True).stdout)
    return int(mebibytes * 2**20 - SPARE_GIB * GIB)


def measure(options: argparse.Namespace) -> int:
    """Measure all cases with one driver; each has its own results."""
    budget_bytes = device_bytes(options)  # a missing device is an error before anything is started
    pace = Pace(
        rounds=options.rounds,
        seconds=options.seconds,
        fewest_steps=options.fewest_steps,
        warmup_steps=options.warmup_steps,
        timeout_seconds=options.timeout,
    )
    with tempfile.TemporaryDirectory(prefix="bench-step-") as parent:
        folder, entries, results = Path(parent), [], {}
        for name in options.case.split(","):
            data = write_tokens(name, folder, options)
            entries += entries_of(name, options, data)
            results[name] = Results(name, options, build_run(CASES[name], options, data))
        schedule = InterleavedSchedule(
            budget_bytes, pace, folder, lambda kind, process: results[process.entry.case].add(kind, process)
        )
        schedule.run(entries)
    for name, found in results.items():
        if not found.is_sound:
            print(
                f"error: {name}: the first losses differ, so contenders compute different things",
                file=sys.stderr,
            )
    is_measured = all(any("error" not in row for row in found.rows) for found in results.values())
    is_sound = all(found.is_sound for found in results.values())
    return 0 if is_measured and is_sound else EXIT_RUN_FAILED


def write_tokens(name: str, folder: Path, options: argparse.Namespace) -> Path:
    """Write random tokens for a case, enough for several steps of the largest batch."""
    case = CASES[name]
    sequences = (options.microbatch or case.microbatch) * (options.accumulation or case.accumulation)
    step_tokens = sequences * case.sequence_length * (case.accumulation_factor or 1)
    num_tokens = 4 * step_tokens if name.startswith("tiny") else max(DATA_TOKENS, 4 * step_tokens)
    data = folder / f"tokens-{name}"
    write_random_tokens(
        data, vocab_size=case.model.vocab_size, num_tokens=num_tokens, mean_tokens=options.documents
    )
    return data


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", default="1b", help=f"one or more, comma-separated, of {', '.join(CASES)}")
    parser.add_argument("--precision", choices=("all", "bf16", "fp8", "fp32"), default="all")
    parser.add_argument("--microbatch", type=int, help="sequences per micro-batch; by default the case's")
    parser.add_argument("--accumulation", type=int, help="micro-batches per step; by default the case's")
    parser.add_argument(
        "--documents",
        type=int,
        help="separate documents of so many tokens on average, with a heavy tail; else they are joined",
    )
    parser.add_argument("--only", help=f"contenders, comma-separated: {','.join(CONTENDERS)}")
    parser.add_argument(
        "--set", action="append", default=[], help="override of our run, such as optim.lr=1e-3"
    )
    parser.add_argument("--eager", action="store_true", help="all contenders without torch.compile")
    parser.add_argument("--profile", action="store_true", help="print the time of a step by kernel class")
    parser.add_argument("--no-sweep", dest="sweep", action="store_false", help="one setting per peer")
    parser.add_argument("--rounds", type=int, default=2, help="windows per contender; 2 is A-B-A-B")
    parser.add_argument("--seconds", type=float, default=2.5, help="length of a timed window")
    parser.add_argument(
        "--fewest-steps", type=int, default=2, help="steps of a window, however long they take"
    )
    parser.add_argument("--warmup-steps", type=int, default=1, help="steps before the first window")
    parser.add_argument(
        "--timeout", type=float, default=240.0, help="time limit in seconds of each state of a contender"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--budget-gib", type=float, help="device memory to share; by default the device's")
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results", help="folder of the results")
    options = parser.parse_args(arguments)
    for name in options.case.split(","):
        if name not in CASES:
            raise SpecError(
                f"no case is called {name!r}", where="--case", hint=f"known are {', '.join(CASES)}"
            )
    return options


def main() -> int:
    """Run the program; SIGTERM ends the contenders as well, and an input error is one line."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_INTERRUPTED))
    try:
        return measure(parse())
    except MeshwrightError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
