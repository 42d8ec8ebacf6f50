"""Reads the files of a run directory; a missing or damaged file is named and does not stop the reader."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.errors import DataError, SpecError
from meshwright.files import read_bounded
from meshwright.observe.events import Event, events_path, read_events
from meshwright.observe.history import History, read_history
from meshwright.observe.metrics import METRICS_NAME
from meshwright.observe.summary import SUMMARY_NAME, read_summary
from meshwright.spec.yaml_text import parse_yaml

RUN_NAME = "run.yaml"
SAMPLE_NAME = "sample.txt"
MAX_SAMPLE_CHARACTERS = 20_000
# No file of ours but metrics and events is near this size; a larger one is damaged or hostile.
_MAX_TEXT_BYTES = 4 << 20
READ_COLUMNS = (
    *("loss", "grad_norm", "lr", "tokens", "step_tokens", "step_seconds", "tokens_per_second"),
    *("tflops_per_gpu", "mfu", "peak_bytes", "eval_loss", "loss_scale", "skipped", "noise_scale_tokens"),
    *("expert_load_max", "expert_load_min", "reward_margin", "reward_accuracy"),
)
"""The columns of metrics.jsonl that are read."""


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """The content of a run directory."""

    run_dir: Path
    run_text: str
    """run.yaml as written; empty when absent."""
    run: dict[str, Any]
    """run.yaml parsed; empty when absent or damaged."""
    history: History
    """The columns of metrics.jsonl that a report or a comparison uses."""
    events: list[Event]
    """Events of rank 0."""
    sample: str
    summary: dict[str, Any]
    absent: list[str]
    """Names of files that are missing or cannot be read, with the reason when damaged."""

    @property
    def name(self) -> str:
        """The name of the run, or that of its directory."""
        return str(self.run.get("name") or self.run_dir.resolve().name)


def read_run(run_dir: Path | str, *, columns: Sequence[str] = READ_COLUMNS) -> RunFiles:
    """The readable content of a run directory, with these columns; raises DataError when it is not one."""
    run_dir = Path(run_dir)
    require_run(run_dir)
    run_text, run = read_yaml(run_dir / RUN_NAME)
    files = RunFiles(
        run_dir=run_dir,
        run_text=run_text,
        run=run,
        history=read_history(run_dir, columns),
        events=read_events(events_path(run_dir, 0)),
        sample=_read_text(run_dir / SAMPLE_NAME)[:MAX_SAMPLE_CHARACTERS],
        summary=read_summary(run_dir),
        absent=[],
    )
    files.absent.extend(_absent(files))
    return files


def require_run(run_dir: Path) -> None:
    """DataError where a path is no run directory, with the runs that may have been meant."""
    if not run_dir.exists():
        raise DataError("there is no such directory", where=str(run_dir), hint=_runs_in(run_dir.parent))
    if not run_dir.is_dir():
        raise DataError(
            "this is a file, not a run directory",
            where=str(run_dir),
            hint="`meshwright train` makes a run directory from a run file",
        )
    if not any((run_dir / name).is_file() for name in (RUN_NAME, METRICS_NAME)):
        raise DataError(
            f"not a run directory: it has neither {RUN_NAME} nor {METRICS_NAME}",
            where=str(run_dir),
            hint=_runs_in(run_dir) or _loop_hint(run_dir),
        )


def _loop_hint(run_dir: Path) -> str:
    """What a directory of `meshwright.prepare` has, in which the user's loop logs what it wants."""
    if not (run_dir / "checkpoints").is_dir():
        return ""
    return "a loop of meshwright.prepare saves checkpoints only; meshwright.fit also writes metrics"


def _runs_in(folder: Path) -> str:
    """A hint with the run directories that may have been meant."""
    found = sorted(metrics.parent.name for metrics in folder.glob(f"*/{METRICS_NAME}"))
    return f"runs in {folder}: {', '.join(found[:5])}" if found else ""


def _read_text(path: Path) -> str:
    try:
        return read_bounded(path, max_bytes=_MAX_TEXT_BYTES).decode(errors="replace")
    except OSError:
        return ""


def read_yaml(path: Path) -> tuple[str, dict[str, Any]]:
    """The text of a YAML file, and its mapping; both empty where it is absent or damaged."""
    text = _read_text(path)
    try:
        values = parse_yaml(text, str(path)).value
    except SpecError:
        return text, {}
    return text, values if isinstance(values, dict) else {}


def _absent(files: RunFiles) -> list[str]:
    content = {
        RUN_NAME: files.run,
        METRICS_NAME: files.history,
        "events-0.jsonl": files.events,
        SUMMARY_NAME: files.summary,
        SAMPLE_NAME: files.sample,
    }
    missing = [name for name, value in content.items() if not value]
    return [f"{name} (unreadable)" if _has_bytes(files.run_dir / name) else name for name in missing]


def _has_bytes(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0
