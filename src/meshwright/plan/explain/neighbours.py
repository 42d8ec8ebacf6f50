"""The neighbours of the chosen layout: one setting changed, and why it was not chosen."""

from dataclasses import dataclass

from meshwright.plan.search.candidate import Candidate
from meshwright.plan.search.decision import Plan
from meshwright.plan.search.search import TIE_FRACTION
from meshwright.plan.search.what_if import Outcome
from meshwright.units import show_bytes, show_seconds

ITEM_NAMES = {
    "matmul": "matmuls",
    "attention": "attention",
    "elementwise": "norms and activations",
    "recompute": "recomputing activations",
    "head": "the output head",
    "embedding": "the embedding",
    "tp": "tensor-parallel messages",
    "cp": "context-parallel messages",
    "ep": "dispatching tokens to experts",
    "fsdp": "gathering sharded weights",
    "host": "waiting for the host to launch kernels",
    "imbalance": "uneven pipeline stages",
    "bubble": "the pipeline bubble",
    "pp": "pipeline messages",
    "dp": "reducing gradients",
    "optimizer": "the optimizer",
    "offload": "host transfers",
}
"""What each item of a step's seconds is called in a sentence."""
MIN_BYTES_SHOWN = 2**20


@dataclass(frozen=True)
class Neighbour:
    """One change of the chosen layout and the reason against it."""

    change: str
    reason: str
    device_bytes: float | None
    step_seconds: float | None


def neighbours(plan: Plan) -> list[Neighbour]:
    """Every change of one setting of the chosen layout: those that fit first, from fast to slow."""
    found = [_neighbour(plan.best, outcome) for outcome in plan.neighbours]
    return sorted(found, key=lambda each: (each.step_seconds is None, each.step_seconds or 0.0))


def _neighbour(best: Candidate, outcome: Outcome) -> Neighbour:
    text = outcome.change.text
    if outcome.candidate is not None and outcome.fits:
        reason = _compared(best, outcome.candidate)
        return Neighbour(text, reason, outcome.device_bytes, outcome.step_seconds)
    return Neighbour(text, outcome.reason, None if outcome.broken_rule else outcome.device_bytes, None)


def _compared(best: Candidate, other: Candidate) -> str:
    """How much slower the other layout is, and which item grew most."""
    difference = other.step_seconds / best.step_seconds - 1.0
    saved = best.device_bytes - other.device_bytes
    memory = "as much memory"
    if abs(saved) >= MIN_BYTES_SHOWN:
        memory = f"saves {show_bytes(saved)} not needed" if saved > 0 else f"costs {show_bytes(-saved)} more"
    if difference < -TIE_FRACTION:
        return f"{-difference:.1%} faster, but the objective is {best.question.objective}; {memory}"
    if difference < 0:
        return f"{-difference:.1%} faster, within {TIE_FRACTION:.0%}, and not as simple; {memory}"
    before, after = best.seconds_items, other.seconds_items
    growth = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in {*after, *before}}
    worst = max(growth, key=lambda name: growth[name])
    if growth[worst] <= 0 or difference < 0.001:
        unmeasured = ", if the copies overlap as predicted" if _copies_more(best, other) else ""
        return f"equally fast{unmeasured}; {memory}"
    more = f"{show_seconds(growth[worst])} more for {ITEM_NAMES.get(worst, worst)}"
    return f"{difference:.1%} slower: {more}; {memory}"


def _copies_more(best: Candidate, other: Candidate) -> bool:
    """Whether the other layout moves activations to the host, which the planner hides behind the compute."""
    return "activations" in set(other.run.memory.offload) - set(best.run.memory.offload)
