"""What a plan would gain from changes that were not allowed, on the meshes that it considered best."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from meshwright.plan.search.allow import NumericsChange, single_changes
from meshwright.plan.search.choose_precision import with_run
from meshwright.plan.search.decision import Plan
from meshwright.plan.search.search import TIE_FRACTION, search_meshes
from meshwright.plan.search.space import Table
from meshwright.units import show_bytes, show_seconds


@dataclass(frozen=True)
class Offer:
    """One change that is not allowed, and the best step and memory with it."""

    word: str
    setting: str
    meaning: str
    step_seconds: float
    device_bytes: float
    text: str


def offers(plan: Plan) -> list[Offer]:
    """Single changes that would make the plan faster by more than it errs, the fastest first."""
    return sorted(_offers(plan), key=lambda offer: offer.step_seconds)


def _offers(plan: Plan) -> Iterator[Offer]:
    question, fastest = plan.question, float(plan.found.fitting.step_seconds.min())
    table = _meshes(plan)
    device, pinned = question.cluster.device, question.pins.overrides
    for variant in single_changes(question.run, question.allow, pinned, device):
        fitting = search_meshes(with_run(question, variant), table).fitting
        if len(fitting) == 0:
            continue
        row = int(fitting.step_seconds.argmin())
        seconds, need = float(fitting.step_seconds[row]), float(fitting.device_bytes[row])
        if seconds < (1.0 - TIE_FRACTION) * fastest:
            yield _offer(variant.changes[0], seconds, need, fastest)


def _offer(change: NumericsChange, seconds: float, need: float, now: float) -> Offer:
    text = (
        f"with --allow {change.word} ({change.meaning}) the fastest layout would take "
        f"{show_seconds(seconds)} instead of {show_seconds(now)}, at {show_bytes(need)} per device"
    )
    return Offer(change.word, change.said(), change.meaning, seconds, need, text)


def _meshes(plan: Plan) -> Table:
    """The meshes of the layouts on top."""
    rows = [candidate.at for candidate in plan.top]
    names = ("tp", "cp", "cp_kind", "cp_inner", "ep", "etp", "pp")
    table = {name: np.concatenate([getattr(at, name) for at in rows]) for name in names}
    table["dp"] = np.concatenate([at.dp for at in rows])
    table["num_ranks"] = np.concatenate([at.num_ranks for at in rows])
    return table
