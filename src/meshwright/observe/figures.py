"""The headline figures of a run, computed from the files of its directory."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

from meshwright.observe.events import Event
from meshwright.observe.metrics import Row
from meshwright.observe.run_files import RunFiles


@dataclass(frozen=True)
class SettingChange:
    """A setting that differs from that of the steps before; values are texts."""

    step: int
    setting: str
    old: str
    new: str


@dataclass(frozen=True, kw_only=True)
class RunFigures:
    """Headline figures of a run; None where the directory does not have them."""

    name: str
    outcome: str
    """finished, interrupted or failed as in the summary, else incomplete."""
    final_step: int | None
    total_steps: int | None
    first_loss: float | None
    final_loss: float | None
    """Loss of the last step, finite or not."""
    eval_loss: float | None
    """Loss of the last evaluation."""
    unigram_entropy: float | None
    """Nats per token of the corpus without context, where the summary has it."""
    tokens: int | None
    wall_seconds: float | None
    tokens_per_second: float | None
    """Median over steps, of all ranks together."""
    tflops_per_gpu: float | None
    """Median over steps."""
    mfu: float | None
    """Median over steps."""
    peak_bytes: int | None
    """Peak memory, the largest of any step."""
    resumed_at: list[int]
    """Steps from which the run was resumed."""
    changes: list[SettingChange]
    """Settings that were changed when the run was resumed, by step."""
    non_finite_steps: list[int]
    """Steps whose loss or gradient norm was not a finite number."""
    num_skipped: int
    """Updates that were skipped because fp16 gradients overflowed."""


def run_figures(files: RunFiles) -> RunFigures:
    """The figures of a run directory."""
    rows, summary = files.rows, files.summary
    last: Row = rows[-1] if rows else {}
    total_steps = _nested(files.run, "schedule", "num_steps")
    final_step = _whole(last.get("step") or summary.get("final_step"))
    return RunFigures(
        name=files.name,
        outcome=str(summary.get("outcome") or _outcome(final_step, total_steps)),
        final_step=final_step,
        total_steps=total_steps,
        first_loss=rows[0].get("loss") if rows else None,
        final_loss=last.get("loss"),
        eval_loss=_last(rows, "eval_loss"),
        unigram_entropy=_real(summary.get("unigram_entropy")),
        tokens=_whole(last.get("tokens")),
        wall_seconds=_real(summary.get("wall_seconds")) or _sum(rows, "step_seconds"),
        tokens_per_second=_median(rows, "tokens_per_second"),
        tflops_per_gpu=_median(rows, "tflops_per_gpu"),
        mfu=_median(rows, "mfu"),
        peak_bytes=_whole(max(finite(rows, "peak_bytes"), default=None)),
        resumed_at=resume_steps(files),
        changes=setting_changes(files.events),
        non_finite_steps=[int(row["step"] or 0) for row in rows if not _is_healthy(row)],
        num_skipped=_whole(summary.get("num_skipped")) or sum(bool(row.get("skipped")) for row in rows),
    )


def finite(rows: Iterable[Row], name: str) -> list[float]:
    """The finite values of one column, in order."""
    values = (row.get(name) for row in rows)
    return [float(value) for value in values if value is not None and math.isfinite(value)]


def resume_steps(files: RunFiles) -> list[int]:
    """Steps from which the run was resumed, from the events of rank 0."""
    steps = (_whole(event.get("step")) for event in files.events if event["kind"] == "resume")
    return sorted({step for step in steps if step is not None})


def setting_changes(events: Iterable[Event]) -> list[SettingChange]:
    """The changes that the recorded steps were trained with.

    A later resume from the same or an earlier step starts from the settings of its checkpoint, so changes
    from that step on no longer count.
    """
    found: list[SettingChange] = []
    for event in events:
        step = _whole(event.get("step"))
        if step is None:
            continue
        if event["kind"] == "resume":
            found = [change for change in found if change.step < step]
        elif event["kind"] == "change":
            texts = (str(event.get(name, ""))[:200] for name in ("setting", "old", "new"))
            found.append(SettingChange(step, *texts))
    return found


def _is_healthy(row: Row) -> bool:
    # A skipped step is expected to have an infinite gradient norm; it is counted separately.
    names = ("loss",) if row.get("skipped") else ("loss", "grad_norm")
    values = (row.get(name) for name in names)
    return all(math.isfinite(value) for value in values if value is not None)


def _outcome(final_step: int | None, total_steps: int | None) -> str:
    return "finished" if final_step and total_steps and final_step >= total_steps else "incomplete"


def _nested(values: dict[str, Any], *names: str) -> int | None:
    found: Any = values
    for name in names:
        found = found.get(name) if isinstance(found, dict) else None
    return _whole(found)


def _real(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None


def _whole(value: Any) -> int | None:
    real = _real(value)
    return None if real is None else int(real)


def _last(rows: list[Row], name: str) -> float | None:
    values = [row[name] for row in rows if row.get(name) is not None]
    return values[-1] if values else None


def _sum(rows: list[Row], name: str) -> float | None:
    values = finite(rows, name)
    return sum(values) if values else None


def _median(rows: list[Row], name: str) -> float | None:
    values = finite(rows, name)
    return median(values) if values else None
