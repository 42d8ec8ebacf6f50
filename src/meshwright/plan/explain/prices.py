"""What notes of `check` cost: the share of the step that the change of a note would save."""

from dataclasses import replace
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.hardware.catalogue import Cluster
from meshwright.plan.predict import Prediction, predict_run
from meshwright.spec.advice import Advice
from meshwright.spec.check import check
from meshwright.spec.run import RunSpec

# A smaller share of the step is within the noise of a measurement.
_LEAST_SHARE = 0.005


def with_prices(notes: list[Advice], run: RunSpec, cluster: Cluster) -> list[Advice]:
    """The notes; one that names a change says how much shorter the step would be with it."""
    return [_with_price(note, run, cluster) for note in notes]


def _with_price(note: Advice, run: RunSpec, cluster: Cluster) -> Advice:
    if not note.change:
        return note
    changed = predicted_with(run, dict(note.change), cluster)
    if changed is None:
        return note
    share = saved_share(predict_run(run, cluster), changed)
    gain = f"{share:.0%} shorter" if share >= _LEAST_SHARE else f"no more than {_LEAST_SHARE:.1%} shorter"
    fact = f"{note.fact}; with the change below, a step is {gain} on {cluster.device.title}"
    return replace(note, fact=fact, cost=max(0.0, share))


def saved_share(now: Prediction, changed: Prediction) -> float:
    """Share of the step that a change saves; negative where the step gets longer."""
    return 1.0 - changed.step_seconds / now.step_seconds


def predicted_with(run: RunSpec, change: dict[str, Any], cluster: Cluster) -> Prediction | None:
    """The prediction of a changed run; None where the run would break a rule or cannot be priced."""
    try:
        changed = with_change(run, change)
        return None if check(changed) else predict_run(changed, cluster)
    except (MeshwrightError, ValueError):
        return None


def with_change(run: RunSpec, change: dict[str, Any]) -> RunSpec:
    """The run with other values at these dotted keys."""
    for key, value in change.items():
        run = _changed(run, key.split("."), value)
    return run


def _changed(spec: Any, path: list[str], value: Any) -> Any:
    first, *rest = path
    changed: Any = _changed(getattr(spec, first), rest, value) if rest else value
    return spec.with_(**{first: changed})
