"""How much faster a plan would be with changes of the numerics that are not allowed, on its best meshes."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from meshwright.plan.search.allow import single_changes
from meshwright.plan.search.decision import Plan
from meshwright.plan.search.meshes import Table
from meshwright.plan.search.search import TIE_FRACTION
from meshwright.plan.search.what_if import Change, what_if
from meshwright.units import show_bytes, show_seconds


@dataclass(frozen=True)
class Gain:
    """One change that is not allowed, and the fastest step with it."""

    name: str
    setting: str
    meaning: str
    step_seconds: float
    device_bytes: float
    text: str


def gains(plan: Plan) -> list[Gain]:
    """Single changes that would make the plan clearly faster, the fastest first."""
    return sorted(_gains(plan), key=lambda gain: gain.step_seconds)


def _gains(plan: Plan) -> Iterator[Gain]:
    now, meshes = min(candidate.step_seconds for candidate in plan.top), _meshes_of(plan)
    for variant in single_changes(plan.question):
        (change,) = variant.changes
        # What is not faster by half of the margin in closed form is not by all of it after the simulation.
        below = np.inf if plan.question.objective != "speed" else (1.0 - TIE_FRACTION / 2) * now
        outcome = what_if(Change(change.setting, variant.question, meshes, below))
        if outcome.fits and outcome.step_seconds < (1.0 - TIE_FRACTION) * now:
            seconds, need = outcome.step_seconds, outcome.device_bytes
            text = (
                f"with --allow {change.name} ({change.meaning}) the fastest layout would take "
                f"{show_seconds(seconds)} instead of {show_seconds(now)}, at {show_bytes(need)} per device"
            )
            yield Gain(change.name, change.setting, change.meaning, seconds, need, text)


def _meshes_of(plan: Plan) -> Table:
    """The meshes of the best layouts of a plan."""
    names = (
        "tp",
        "cp",
        "cp_kind",
        "cp_inner",
        "cp_stripes",
        "ep",
        "etp",
        "ep_overlap",
        "pp",
        "dp",
        "num_ranks",
    )
    return {name: np.concatenate([getattr(one.layout, name) for one in plan.top]) for name in names}
