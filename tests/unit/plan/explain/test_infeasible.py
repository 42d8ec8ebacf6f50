"""A question without a plan: what would fit, or which pins contradict which rule."""

import pytest
from tests.support.plans import asked

from meshwright.errors import PlanError, SpecError
from meshwright.plan.make_plan import make_plan


def test_nothing_fits_says_what_would() -> None:
    with pytest.raises(PlanError, match="does not fit on 1 x NVIDIA H100") as caught:
        make_plan(asked("llama-3.1-8b", "h100:1", "memory.offload=[]").question)
    assert caught.value.exit_code == 3
    assert "devices instead of 1 (" in caught.value.hint
    assert "drop memory.offload=[] (" in caught.value.hint
    assert "on the host)" in caught.value.hint


def test_a_pin_that_prevents_a_fit_is_named() -> None:
    question = asked("llama-3.1-8b", "h100:8", "zero=0", "tp=1", "pp=1", "memory.offload=[]").question
    with pytest.raises(PlanError) as caught:
        make_plan(question)
    assert "drop zero=0" in caught.value.hint
    assert "GiB per device" in caught.value.hint


@pytest.mark.parametrize(
    ("pins", "fact", "hint"),
    [
        (["tp=3"], "tp=3 does not divide num_heads=32", "drop tp=3"),
        (["tp=8", "pp=4"], "need 32 ranks, and the cluster has 8 devices", "drop tp=8 or drop pp=4"),
        (["pp=4", "schedule=zbv", "recompute=full"], "would recompute a block", "drop schedule=zbv"),
        (["zero=2", "dp_shard=1", "cp=1"], "no ranks to shard over", "drop zero=2"),
    ],
)
def test_contradictory_pins_name_the_rule_and_what_to_drop(pins: list[str], fact: str, hint: str) -> None:
    with pytest.raises(SpecError) as caught:
        make_plan(asked("llama-3.1-8b", "h100:8", *pins).question)
    assert fact in caught.value.fact
    assert hint in caught.value.hint
    assert caught.value.exit_code == 2
