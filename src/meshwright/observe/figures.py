"""The headline figures of a run, computed from the files of its directory."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.observe.events import Event
from meshwright.observe.history import History, Numbers
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
    history, summary = files.history, files.summary
    total_steps = _nested(files.run, "schedule", "num_steps")
    final_step = _whole(history.steps[-1] if len(history) else summary.get("final_step"))
    return RunFigures(
        name=files.name,
        outcome=str(summary.get("outcome") or _outcome(final_step, total_steps)),
        final_step=final_step,
        total_steps=total_steps,
        first_loss=_at(history, "loss", 0),
        final_loss=_at(history, "loss", -1),
        eval_loss=_last(history, "eval_loss"),
        unigram_entropy=_real(summary.get("unigram_entropy")),
        tokens=_whole(_at(history, "tokens", -1)),
        wall_seconds=_real(summary.get("wall_seconds")) or _sum(history, "step_seconds"),
        tokens_per_second=_median(history, "tokens_per_second"),
        tflops_per_gpu=_median(history, "tflops_per_gpu"),
        mfu=_median(history, "mfu"),
        peak_bytes=_whole(finite(history, "peak_bytes").max(initial=0) or None),
        resumed_at=resume_steps(files),
        changes=setting_changes(files.events),
        non_finite_steps=history.steps[_is_broken(history)].tolist(),
        num_skipped=_whole(summary.get("num_skipped")) or int((history.values("skipped") > 0).sum()),
    )


def finite(history: History, name: str) -> Numbers:
    """The finite values of one column, in order."""
    values = history.values(name)
    return values[np.isfinite(values)]


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


def _is_broken(history: History) -> NDArray[np.bool_]:
    """Where the loss or the gradient norm is recorded and not finite."""
    broken = np.zeros(len(history), np.bool_)
    for name in ("loss", "grad_norm"):
        if name in history.columns:
            broken |= history.recorded[name] & ~np.isfinite(history.columns[name]) & ~_expected(history, name)
    return broken


def _expected(history: History, name: str) -> NDArray[np.bool_]:
    # A skipped step is expected to have an infinite gradient norm; it is counted separately.
    if name != "grad_norm" or "skipped" not in history.columns:
        return np.zeros(len(history), np.bool_)
    return np.nan_to_num(history.columns["skipped"]) > 0


def _outcome(final_step: int | None, total_steps: int | None) -> str:
    return "finished" if final_step and total_steps and final_step >= total_steps else "incomplete"


def _nested(values: dict[str, Any], *names: str) -> int | None:
    found: Any = values
    for name in names:
        found = found.get(name) if isinstance(found, dict) else None
    return _whole(found)


def _real(value: Any) -> float | None:
    is_number = isinstance(value, int | float | np.integer) and not isinstance(value, bool)
    try:
        return float(value) if is_number and math.isfinite(value) else None
    except OverflowError:  # an integer beyond float64 in a damaged file
        return None


def _whole(value: Any) -> int | None:
    real = _real(value)
    return None if real is None else int(real)


def _at(history: History, name: str, row: int) -> float | None:
    if not len(history) or not history.recorded.get(name, np.zeros(len(history)))[row]:
        return None
    return float(history.columns[name][row])


def _last(history: History, name: str) -> float | None:
    values = history.values(name)
    return float(values[-1]) if len(values) else None


def _sum(history: History, name: str) -> float | None:
    values = finite(history, name)
    return float(values.sum()) if len(values) else None


def _median(history: History, name: str) -> float | None:
    values = finite(history, name)
    return float(np.median(values)) if len(values) else None
