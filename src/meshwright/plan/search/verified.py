"""A plan after its best layouts were traced: those that do not fit are dropped, and the next one is chosen.

The trace gives allocated bytes of the run without compilation; the prediction of the same is beside it. Their
ratio corrects the prediction of the run, compiled or not. Fragmentation and what lies outside of torch's
allocator stay as predicted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from meshwright.errors import PlanError
from meshwright.plan.search.candidate import Candidate, layout_text
from meshwright.plan.search.decision import Plan
from meshwright.plan.search.neighbours import neighbours_of, with_experts_on_ranks, without_axes
from meshwright.units import show_bytes


@dataclass(frozen=True)
class TracedLayout:
    """A layout with its predicted and its traced peak."""

    candidate: Candidate
    traced_bytes: float
    """Allocated bytes at the peak without compilation, traced."""

    @cached_property
    def predicted_bytes(self) -> float:
        """Allocated bytes at the peak without compilation, predicted."""
        return uncompiled(self.candidate).allocated_bytes

    @property
    def error(self) -> float:
        """Predicted over traced allocated bytes, less one."""
        return self.predicted_bytes / self.traced_bytes - 1.0

    @property
    def device_bytes(self) -> float:
        """Peak bytes on the device: allocated bytes corrected by the trace, the rest as predicted."""
        missing = self.candidate.allocated_bytes * (self.traced_bytes / self.predicted_bytes - 1.0)
        return self.candidate.device_bytes + missing

    @property
    def fits(self) -> bool:
        """Whether it stays inside the memory that the question may use."""
        return self.device_bytes <= self.candidate.question.memory_budget_bytes


def uncompiled(candidate: Candidate) -> Candidate:
    """The same layout without compilation."""
    question = candidate.question
    return replace(candidate, question=replace(question, run=question.run.with_(compile=False)))


def verified_plan(plan: Plan, traced: Sequence[TracedLayout]) -> Plan:
    """The plan without the layouts that do not fit; PlanError where none of the traced ones does."""
    dropped = [each.candidate for each in traced if not each.fits]
    if not dropped:
        return plan
    kept = [each.candidate for each in traced if each.fits]
    if not kept:
        raise _none_fits(plan, traced)
    top = (*kept, *(each for each in plan.top if each not in dropped and each not in kept))
    best = plan.best if plan.best in kept else kept[0]
    if best is plan.best:
        return replace(plan, top=top)
    fitting = plan.result.fitting
    return replace(
        plan,
        best=best,
        top=top,
        neighbours=tuple(neighbours_of(best)),
        without=without_axes(best, top, fitting),
        with_ep=with_experts_on_ranks(best, top, fitting),
    )


def _none_fits(plan: Plan, traced: Sequence[TracedLayout]) -> PlanError:
    least = min(traced, key=lambda each: each.device_bytes)
    budget = show_bytes(plan.question.memory_budget_bytes)
    return PlanError(
        f"none of the {len(traced)} best layouts fits when traced: the smallest "
        f"({layout_text(least.candidate.run)}) needs {show_bytes(least.device_bytes)} of {budget}",
        where="--verify",
        hint="verify more layouts, or set recompute=full or --objective memory",
    )


def order_text(plan: Plan, traced: Sequence[TracedLayout]) -> str:
    """Whether the order changed: `the order stays`, or which layouts were dropped."""
    dropped = [number for number, each in enumerate(traced, start=1) if not each.fits]
    if not dropped:
        return "every traced layout fits: the order stays"
    listed = " and ".join(map(str, dropped))
    found = next(number for number, each in enumerate(traced, start=1) if each.fits)
    chosen = (
        f"layout {found} is now the choice" if plan.best is not traced[0].candidate else "the choice stays"
    )
    return f"layout {listed} does not fit and is dropped: {chosen}"
