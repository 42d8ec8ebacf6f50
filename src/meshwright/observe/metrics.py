"""metrics.jsonl: one JSON object per step, always one clean history of the run.

A line is with the operating system before the next step begins, so a killed process loses
at most the line it was writing. Resuming removes that incomplete line and every line after the restored
step. Numbers that JSON has no notation for (an infinite loss, say) are written as the texts "NaN",
"Infinity" and "-Infinity", and read back as numbers.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Self

from meshwright.errors import RunError
from meshwright.observe.metrics_index import IndexWriter

METRICS_NAME = "metrics.jsonl"
NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

_TAIL_BYTES = 2**14

Row = dict[str, float | int | bool | None]
"""One line of metrics.jsonl as it was read; keys that the writer omitted are missing."""


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """Figures of one optimizer step, already reduced over all ranks.

    The three rates are filled in by `MetricsWriter`; optional values are not in the line when None.
    """

    step: int
    """Optimizer updates done, this one included: the first line has step 1."""
    loss: float
    """Sum over target tokens / global number of target tokens of the step."""
    grad_norm: float
    """Global norm before clipping."""
    lr: float
    tokens: int
    """Positions trained on since the start of the run, this step included."""
    step_tokens: int
    """Positions of this step over all ranks."""
    step_seconds: float
    """Wall time of this step alone; evaluation and checkpoints are not in it."""
    peak_bytes: int | None
    """Peak memory, the largest over ranks; None where it cannot be measured."""
    data_wait_seconds: float | None = None
    """Part of step_seconds in which the rank that waited longest waited for its batch."""
    reduce_wait_seconds: float | None = None
    """Part of step_seconds in which even the slowest rank waited for the collectives of data parallelism
    (exposed communication): for reduced gradients, and with ZeRO-3 for gathered parameters. None where it is
    not measured: ZeRO-3 with compiled blocks or user modules."""
    tokens_per_second: float | None = None
    """Tokens per second of all ranks together."""
    tflops_per_gpu: float | None = None
    """Model FLOPs by the strict convention of `plan/workload/flops.py`; recompute is not counted."""
    mfu: float | None = None
    """tflops_per_gpu / datasheet dense peak; None where the peak is unknown (a CPU)."""
    eval_loss: float | None = None
    loss_scale: float | None = None
    """fp16 only: the loss scale after this step."""
    skipped: bool | None = None
    """fp16 only: an update since the previous line was skipped because gradients overflowed."""
    aux_loss: float | None = None
    """Load-balancing loss of the experts, before its coefficient."""
    expert_load_max: float | None = None
    """Tokens of the expert with the most tokens of any layer / tokens under perfect balance."""
    expert_load_min: float | None = None
    """The same for the expert with the fewest tokens."""
    reward_margin: float | None = None
    """Preference pairs: mean reward of the chosen answers - mean reward of the rejected ones."""
    reward_accuracy: float | None = None
    """Preference pairs: share of pairs whose chosen answer has the higher reward."""
    gradient_signal: float | None = None
    """Squared norm of the gradient of all data, as one step estimates it; may be negative."""
    gradient_noise: float | None = None
    """Variance of one token's gradient, summed over parameters, as one step estimates it."""
    noise_scale_tokens: float | None = None
    """Average of gradient_noise / average of gradient_signal."""

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradient norm are numbers to train on."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


# Always present in a line, null where unknown; every other field is left out when it is None.
_ALWAYS = (
    "step",
    "loss",
    "grad_norm",
    "lr",
    "tokens",
    "step_seconds",
    "tokens_per_second",
    "tflops_per_gpu",
    "mfu",
    "peak_bytes",
)


@dataclass(frozen=True)
class WorkRate:
    """The factors that turn tokens per second into FLOP/s per device and MFU."""

    flops_per_token: float | None
    """None: unknown, so FLOP/s and MFU are null."""
    num_ranks: int
    peak_flops_per_second: float | None = None
    """Datasheet dense peak of one device in the run's precision; None: unknown, so MFU is null."""

    def fill(self, metrics: StepMetrics) -> StepMetrics:
        """The same metrics with tokens_per_second, tflops_per_gpu and mfu."""
        if metrics.step_seconds <= 0:
            return metrics
        tokens_per_second = metrics.step_tokens / metrics.step_seconds
        if self.flops_per_token is None:
            return replace(metrics, tokens_per_second=tokens_per_second)
        flops_per_second = tokens_per_second * self.flops_per_token / self.num_ranks
        peak = self.peak_flops_per_second
        return replace(
            metrics,
            tokens_per_second=tokens_per_second,
            tflops_per_gpu=flops_per_second / 1e12,
            mfu=flops_per_second / peak if peak else None,
        )


class MetricsWriter:
    """Appends to the metrics.jsonl of a run, on rank 0 only. Use as a context."""

    def __init__(self, run_dir: Path | str, work_rate: WorkRate, *, restored_step: int = 0) -> None:
        """Open the file; lines after `restored_step` (0: a new run) and incomplete lines are removed."""
        self._path = Path(run_dir) / METRICS_NAME
        self._work_rate = work_rate
        self._path.parent.mkdir(parents=True, exist_ok=True)
        truncate_after(self._path, restored_step)
        # Unbuffered: one line is one write, so the operating system has it when write returns.
        self._file: BinaryIO = self._path.open("ab", buffering=0)
        self._index = IndexWriter(self._path)

    def write(self, metrics: StepMetrics) -> StepMetrics:
        """Append one line; returns the metrics with their rates. RunError where the file was moved away."""
        self._require_in_place(metrics.step)
        complete = self._work_rate.fill(metrics)
        line = format_line(complete).encode()
        self._file.write(line)
        self._index.append(len(line), vars(complete))
        return complete

    def rewind(self, step: int) -> None:
        """Remove the lines after `step`: the run has gone back to it."""
        self._file.close()
        self._index.close()
        truncate_after(self._path, step)
        self._file = self._path.open("ab", buffering=0)
        self._index = IndexWriter(self._path)

    def _require_in_place(self, step: int) -> None:
        try:
            is_in_place = os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())
        except OSError:
            is_in_place = False
        if not is_in_place:
            raise RunError(
                f"the run directory was deleted or renamed while the run was at step {step}",
                where=str(self._path.parent),
                hint="put it back and run again: the run resumes from its newest checkpoint",
            )

    def close(self) -> None:
        """Flush to the disk and close the file."""
        os.fsync(self._file.fileno())
        self._file.close()
        self._index.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def format_line(metrics: StepMetrics) -> str:
    """One line of strict JSON, with its newline."""
    values = asdict(metrics)
    kept = {name: values[name] for name in _ALWAYS}
    kept |= {name: value for name, value in values.items() if name not in kept and value is not None}
    return to_json(kept) + "\n"


def to_json(values: Mapping[str, Any]) -> str:
    """Strict JSON on one line; NaN and infinities become texts."""
    return json.dumps({name: json_value(value) for name, value in values.items()}, allow_nan=False)


def json_value(value: Any) -> Any:
    """The value itself, or a text for NaN and infinities, which JSON has no notation for."""
    if not isinstance(value, float) or math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def read_metrics(path: Path | str) -> list[Row]:
    """The steps of a metrics.jsonl (or of a run directory) in order.

    Anything but a complete line with a step is skipped, a missing or unreadable file has no rows, and the
    last line of a step counts. Non-finite numbers are read as numbers.
    """
    path = Path(path)
    path = path / METRICS_NAME if path.is_dir() else path
    try:
        lines = _lines(path)
    except OSError:
        return []
    by_step = {int(row["step"] or 0): row for row in _rows(lines)}
    return [by_step[step] for step in sorted(by_step)]


def last_step(run_dir: Path | str) -> int:
    """The step of the last complete line of metrics.jsonl, read from its end; 0 where there is none."""
    try:
        with (Path(run_dir) / METRICS_NAME).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            rows = list(_rows(file.read().splitlines(keepends=True)))
    except OSError:
        return 0
    return int(rows[-1]["step"] or 0) if rows else 0


def truncate_after(path: Path, last_step: int) -> None:
    """Remove the lines after `last_step` and incomplete lines, atomically."""
    if not path.exists():
        return
    draft = path.with_name(path.name + ".draft")
    with path.open("rb") as before, draft.open("wb") as after:
        num_removed = 0
        for line in before:
            is_kept = any(int(row["step"] or 0) <= last_step for row in _rows([line]))
            num_removed += not is_kept
            if is_kept:
                after.write(line)
        after.flush()
        os.fsync(after.fileno())
    if num_removed:
        draft.replace(path)
    else:
        draft.unlink()


def _lines(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return []


def _rows(lines: Iterable[bytes]) -> Iterable[Row]:
    for line in lines:
        row = _parse(line)
        if row is not None:
            yield row


def _parse(line: bytes) -> Row | None:
    """The numbers of a line; None for an incomplete line, which has no newline at its end."""
    if not line.endswith(b"\n"):
        return None
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):  # deep nesting in a damaged line
        return None
    step = values.get("step") if isinstance(values, dict) else None
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        return None
    return {name: _number(value) for name, value in values.items() if _is_number(value)}


def _is_number(value: Any) -> bool:
    if isinstance(value, str):
        return value in NON_FINITE
    return value is None or isinstance(value, bool | int | float)


def _number(value: Any) -> float | int | bool | None:
    return NON_FINITE[value] if isinstance(value, str) else value
