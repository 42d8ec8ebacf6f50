"""Neighbours of the chosen layout, each with the reason against it."""

from tests.support.plans import planned, small_plan

from meshwright.plan.explain.neighbours import neighbours


def test_neighbours_have_the_reason_against_them() -> None:
    reasons = {each.change: each.reason for each in neighbours(planned("llama-3.1-8b", "h100:8x8"))}
    assert "does not fit" in reasons["zero=3 -> 2"]
    assert "slower" in reasons["recompute=none -> full"]
    assert "tensor-parallel messages" in reasons["tp=1 -> 2"]
    vocabulary = {each.change: each.reason for each in neighbours(small_plan())}
    assert "does not divide vocab_size=50257" in vocabulary["tp=1 -> 2"]


def test_a_pinned_axis_has_no_neighbours() -> None:
    plan = planned("llama-3.1-8b", "h100:8x8", "tp=2")
    assert not [each for each in neighbours(plan) if each.change.startswith("tp=")]


def test_without_cp_there_are_no_stripes() -> None:
    """Else every layout without cp would be refused for a setting that has no effect there."""
    plan = planned("llama-3.1-8b", "h100:8x8", "tp=1", "parallel.cp_stripes=4", seq=32768)
    assert plan.best.run.parallel.cp_stripes == 4
    reasons = {each.change: each.reason for each in neighbours(plan) if each.change.startswith("cp=")}
    assert reasons and not any("cp_stripes" in reason for reason in reasons.values())
