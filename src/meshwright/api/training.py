"""`meshwright.train`: trains a run in processes of its own and returns what it recorded."""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from meshwright.api import html
from meshwright.api.questions import RunLike, load
from meshwright.errors import EXIT_INTERRUPTED, RunError
from meshwright.observe.history import History, read_history
from meshwright.plan.draw.charts import Axis, Line, line_chart
from meshwright.spec.run import RunSpec
from meshwright.spec.text import dump_run
from meshwright.svg import PALETTE
from meshwright.units import show_count, show_seconds

COLUMNS = ("loss", "grad_norm", "lr", "step_seconds", "tokens_per_second", "mfu", "peak_bytes")
MOST_POINTS = 400


@dataclass(frozen=True)
class TrainResult:
    """A run that trained: its directory, and the metrics of every step."""

    run: RunSpec
    directory: Path
    is_finished: bool
    """Whether the last step was reached; false for a run that was asked to stop."""

    @cached_property
    def history(self) -> History:
        """The metrics by step: `history.values("loss")`, `history.points("step_seconds")`."""
        return read_history(self.directory, COLUMNS)

    @property
    def loss(self) -> float:
        """The loss of the last step."""
        return float(self.history.values("loss")[-1])

    def _facts(self) -> list[tuple[str, str]]:
        history = self.history
        seconds = sorted(history.values("step_seconds"))
        facts = [("steps", f"{len(history)} of {self.run.schedule.num_steps}"), ("loss", f"{self.loss:.4f}")]
        if seconds:
            facts.append(("step, median", show_seconds(float(seconds[len(seconds) // 2]))))
        return [*facts, ("directory", str(self.directory))]

    def __repr__(self) -> str:
        return "\n".join([self.run.name, *(f"{name}: {value}" for name, value in self._facts())])

    def _repr_html_(self) -> str:
        """Figures of the run and its loss curve."""
        points = self.history.points("loss")
        thinned = points[:: -(-len(points) // MOST_POINTS)] if len(points) else points
        drawn = Line("loss", [(float(x), float(y)) for x, y in thinned], PALETTE[0])
        axes = Axis("step", lambda step: f"{step:g}"), Axis("loss", show_count)
        curve = line_chart([drawn], x=axes[0], y=axes[1]).inline() if len(points) else ""
        head = html.heading(self.run.name)
        return html.fragment(head, html.table(("", ""), self._facts(), text_columns=(0, 1)), curve)


def train(
    run: RunLike,
    *,
    directory: str | Path | None = None,
    stop_after: int | None = None,
    overrides: Sequence[str] = (),
    quiet: bool = False,
) -> TrainResult:
    """Train a run as `meshwright train` does, in processes of its own, and wait for it.

    Its output is printed here. Started again with the same directory, the run resumes from its newest
    checkpoint. Raises RunError where it fails; an interrupted or stopped run is returned with `is_finished`
    false.
    """
    spec = load(run, overrides).require_valid()
    run_dir = Path(directory) if directory is not None else Path("runs") / spec.name
    with tempfile.TemporaryDirectory(prefix="meshwright-train-") as folder:
        file = Path(folder) / "run.yaml"
        file.write_text(dump_run(spec), encoding="utf-8")
        arguments = ["train", str(file), "--dir", str(run_dir)]
        arguments += ["--stop-after", str(stop_after)] if stop_after is not None else []
        code, last = _run([*arguments, *(["--quiet"] if quiet else [])], quiet=quiet)
    if code not in (0, EXIT_INTERRUPTED):
        raise RunError(f"the run failed with exit code {code}: {last}", where=str(run_dir))
    steps = read_history(run_dir, ("loss",)).steps
    return TrainResult(spec, run_dir, bool(len(steps)) and int(steps[-1]) >= spec.schedule.num_steps)


def _run(arguments: Sequence[str], *, quiet: bool) -> tuple[int, str]:
    """The exit code of the command, and the last lines that it printed; each line is printed here."""
    command = [sys.executable, "-m", "meshwright", *arguments]
    last: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            last = [*last[-4:], line.strip()]
            if not quiet:
                print(line, end="")
    return process.returncode, " / ".join(filter(None, last))
