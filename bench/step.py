"""A whole training step, ours and the peers', in one run on the same weights, tokens, batch and precision.

    python bench/step.py --case 1b                  us and every peer that is installed, swept, then A-B-A-B
    python bench/step.py --case 124m,1b,8b          one after the other; what compiles does so side by side
    python bench/step.py --case 1b --only ours --precision bf16 --profile      where the time of a step goes
    python bench/step.py --case tiny --device cpu   the same program in a minute, for a look

Every contender with each of its settings has a process of its own, which stays
(bench/interleaved/schedule.py) and is timed when its turn comes: by device events, over data fetch, copy to the device, forward, backward, clipping and
update. The losses of first steps must agree. Results go to bench/results as JSON, a page and a picture, after
every turn. What each technique adds is told by bench/ladder.py.
"""

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.interleaved.process import GIB, Resident
from bench.interleaved.schedule import Pace, Turns
from bench.reports.step import losses_agree, print_row, write_results
from bench.workloads.cases import CASES, build_run, entries_of, notes_of

from meshwright.bench.kernel_time import KernelBudget, show_budget
from meshwright.bench.machine_facts import package_versions
from meshwright.bench.random_tokens import write_random_tokens
from meshwright.bench.step import rates
from meshwright.errors import EXIT_INTERRUPTED, EXIT_RUN_FAILED, MeshwrightError, SpecError
from meshwright.mesh import choose_device
from meshwright.spec import RunSpec

ROOT = Path(__file__).resolve().parents[1]
DATA_TOKENS = 1 << 22
# What a card keeps for itself, and what an estimate may be wrong by.
SPARE_GIB = 2.5
PACKAGES = ("transformers", "accelerate", "pytorch_lightning", "triton")


class Results:
    """The rows of one case, written anew after each of them."""

    def __init__(self, name: str, options: argparse.Namespace, run: RunSpec) -> None:
        self._name, self._options, self._run = name, options, run
        self._started_at = time.perf_counter()
        self.rows: list[dict[str, Any]] = []

    def add(self, kind: str, one: Resident) -> None:
        """The newest of a contender: what it measured, or how it ended."""
        self.rows.append(row_of(kind, one))
        print_row(self.rows[-1])
        if self._options.profile and self.rows[-1].get("kernel_seconds"):
            print_profile(self.rows[-1])
        write_results(self.summary(), self._options.out)

    @property
    def is_sound(self) -> bool:
        """Whether all first losses agree."""
        return losses_agree(self.rows)

    def summary(self) -> dict[str, Any]:
        """Everything, as it is written."""
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


def row_of(kind: str, one: Resident) -> dict[str, Any]:
    """What is known of a contender after a turn, with its rates; of one that failed, its words."""
    run = RunSpec.model_validate(one.entry.run)
    precision = "fp8" if run.precision.fp8 else run.precision.compute
    row = {"kind": kind, "precision": precision, **one.entry.facts}
    if one.error is not None:
        return {**row, "error": one.error, "words": one.words}
    timing = one.timings[-1]
    if timing["times"] > 1:
        row["label"] += f", {timing['times'] * run.accumulation} micro-batches a step"
    data = run.data.with_(batch_sequences=run.data.batch_sequences * timing["times"])
    return {**row, **one.told, **timing, **rates(run.with_(data=data), timing)}


def print_profile(row: dict[str, Any]) -> None:
    """Where the time of a step went."""
    whole = sum(row["kernel_seconds"].values())
    budget = KernelBudget(whole, row["kernel_seconds"], [tuple(each) for each in row["largest_kernels"]])
    print(show_budget(budget, num_largest=25), flush=True)


def card_bytes(options: argparse.Namespace) -> int:
    """The memory that contenders may share; without a card there is no limit."""
    if options.budget_gib:
        return int(options.budget_gib * GIB)
    if choose_device(options.device, 0).type != "cuda":
        return sys.maxsize
    asked = ["nvidia-smi", "--id=0", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    mebibytes = float(subprocess.run(asked, capture_output=True, text=True, check=True).stdout)
    return int(mebibytes * 2**20 - SPARE_GIB * GIB)


def measure(options: argparse.Namespace) -> int:
    """All cases through one driver, each with its own results."""
    budget_bytes = card_bytes(options)  # a device that is not there is told before anything is started
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
        turns = Turns(budget_bytes, pace, folder, lambda kind, one: results[one.entry.case].add(kind, one))
        turns.run(entries)
    for name, found in results.items():
        if not found.is_sound:
            print(f"error: {name}: first losses differ: not the same was computed", file=sys.stderr)
    is_measured = all(any("error" not in row for row in found.rows) for found in results.values())
    is_sound = all(found.is_sound for found in results.values())
    return 0 if is_measured and is_sound else EXIT_RUN_FAILED


def write_tokens(name: str, folder: Path, options: argparse.Namespace) -> Path:
    """Random tokens for a case: enough for several steps of the largest batch."""
    case = CASES[name]
    sequences = (options.microbatch or case.microbatch) * (options.accumulation or case.accumulation)
    step_tokens = sequences * case.sequence_length * (case.times or 1)
    num_tokens = 4 * step_tokens if name.startswith("tiny") else max(DATA_TOKENS, 4 * step_tokens)
    data = folder / f"tokens-{name}"
    write_random_tokens(data, vocab_size=case.model.vocab_size, num_tokens=num_tokens)
    return data


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", default="1b", help=f"one or more, comma-separated, of {', '.join(CASES)}")
    parser.add_argument("--precision", choices=("all", "bf16", "fp8", "fp32"), default="all")
    parser.add_argument("--microbatch", type=int, help="sequences of a micro-batch; the case has its own")
    parser.add_argument("--accumulation", type=int, help="micro-batches of a step; the case has its own")
    parser.add_argument("--only", help="contenders, comma-separated: ours,hf,plain,lightning")
    parser.add_argument("--set", action="append", default=[], help="ours: an override, like optim.lr=1e-3")
    parser.add_argument("--eager", action="store_true", help="everyone without torch.compile")
    parser.add_argument("--profile", action="store_true", help="print the time of a step by kernel class")
    parser.add_argument("--no-sweep", dest="sweep", action="store_false", help="peers with one setting each")
    parser.add_argument("--rounds", type=int, default=2, help="2 is A-B-A-B")
    parser.add_argument("--seconds", type=float, default=2.5, help="length of a timed window")
    parser.add_argument("--fewest-steps", type=int, default=2, help="of a window, however long they take")
    parser.add_argument("--warmup-steps", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds of one phase of one contender")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--budget-gib", type=float, help="memory that contenders share; the card's by itself")
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results", help="where results are written")
    options = parser.parse_args(arguments)
    for name in options.case.split(","):
        if name not in CASES:
            raise SpecError(
                f"no case is called {name!r}", where="--case", hint=f"known are {', '.join(CASES)}"
            )
    return options


def main() -> int:
    """Errors of the user are told in a line; who ends this program ends the contenders as well."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_INTERRUPTED))
    try:
        return measure(parse())
    except MeshwrightError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
