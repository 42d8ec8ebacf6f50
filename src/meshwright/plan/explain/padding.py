"""What widths cost that waste the hardware, in per cent of the step."""

from dataclasses import replace
from typing import Any

from meshwright.hardware.catalogue import Cluster
from meshwright.plan.predict import predict_run
from meshwright.spec.advice import Advice
from meshwright.spec.run import RunSpec

# A smaller share of the step is within the noise of a measurement.
_LEAST_SHARE = 0.005


def with_prices(notes: list[Advice], run: RunSpec, cluster: Cluster) -> list[Advice]:
    """The notes; one that a padded width would remove says how much shorter the step would be."""
    return [_with_price(note, run, cluster) for note in notes]


def _with_price(note: Advice, run: RunSpec, cluster: Cluster) -> Advice:
    if note.padding is None:
        return note
    key, width = note.padding
    padded = predict_run(_changed(run, key.split("."), width), cluster)
    share = 1.0 - padded.step_seconds / predict_run(run, cluster).step_seconds
    gain = f"{share:.0%} shorter" if share >= _LEAST_SHARE else f"no more than {_LEAST_SHARE:.1%} shorter"
    return replace(note, fact=f"{note.fact}; padded, a step is {gain} on {cluster.device.title}")


def _changed(spec: Any, path: list[str], value: int) -> Any:
    """The spec with another value at this path."""
    first, *rest = path
    changed: Any = _changed(getattr(spec, first), rest, value) if rest else value
    return spec.with_(**{first: changed})
