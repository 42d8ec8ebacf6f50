"""A plan after its best layouts were traced: what does not fit is dropped, and the next one is chosen."""

import pytest
from tests.support.plans import planned

from meshwright.errors import PlanError
from meshwright.plan.explain.reasons import explain
from meshwright.plan.search.decision import Plan
from meshwright.plan.search.verified import TracedLayout, order_text, uncompiled, verified_plan


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned("llama-3.1-8b", "h100:8")


def traced(plan: Plan, *factors: float) -> list[TracedLayout]:
    """The best layouts with traced bytes that are so many times the predicted ones."""
    pairs = zip(plan.top, factors, strict=False)
    return [TracedLayout(each, factor * uncompiled(each).allocated_bytes) for each, factor in pairs]


def test_a_trace_that_agrees_changes_nothing(plan: Plan) -> None:
    found = traced(plan, 1.0, 1.0, 0.9)
    assert verified_plan(plan, found) is plan
    assert found[0].device_bytes == pytest.approx(plan.best.device_bytes)
    assert "the order stays" in order_text(plan, found)


def test_a_choice_that_does_not_fit_is_dropped(plan: Plan) -> None:
    found = traced(plan, 3.0, 1.0, 1.0)
    changed = verified_plan(plan, found)
    assert changed.best is plan.top[1] and plan.best not in changed.top
    assert "layout 1 does not fit and is dropped: layout 2 is now the choice" in order_text(changed, found)
    assert explain(changed)


def test_another_that_does_not_fit_leaves_the_choice(plan: Plan) -> None:
    found = traced(plan, 1.0, 3.0)
    changed = verified_plan(plan, found)
    assert changed.best is plan.best and plan.top[1] not in changed.top
    assert "the choice stays" in order_text(changed, found)


def test_none_that_fits_is_an_error(plan: Plan) -> None:
    with pytest.raises(PlanError, match="none of the 2 best layouts fits when traced"):
        verified_plan(plan, traced(plan, 3.0, 3.0))
