"""Pins restrict what the search decides; everything else becomes an override."""

import pytest

from meshwright.errors import SpecError
from meshwright.plan.search.pins import parse_pins
from meshwright.plan.workload.layouts import FULL, RECOMPUTE_NONE
from meshwright.plan.workload.schedules import SCHEDULES


def test_short_and_full_names_mean_the_same() -> None:
    assert parse_pins(["tp=8"]).allowed == parse_pins(["parallel.tp=8"]).allowed == {"tp": (8,)}


def test_several_values_and_names() -> None:
    pins = parse_pins(["recompute=none,full", "schedule=zbv", "zero=0"])
    assert pins.allowed["recompute"] == (RECOMPUTE_NONE, FULL)
    assert pins.allowed["schedule"] == (SCHEDULES.index("zbv"),)
    assert pins.permits(recompute=FULL, tp=4)
    assert not pins.permits(zero=1)


def test_a_layout_of_the_table_can_be_pinned_as_it_is_printed() -> None:
    pins = parse_pins(["zero=2", "micro=2x64", "recompute=full/4", "offload=optimizer+activations"])
    assert pins.allowed["microbatch_sequences"] == (2,) and pins.allowed["num_microbatches"] == (64,)
    assert pins.allowed["recompute"] == (FULL,) and pins.allowed["recompute_every"] == (4,)
    assert pins.overrides == ("memory.offload=[optimizer, activations]",)
    assert parse_pins(["offload=none", "micro=4"]).overrides == ("memory.offload=[]",)
    assert parse_pins(["grad_reduce=last_microbatch"]).overrides == ("parallel.grad_reduce=last_microbatch",)


def test_other_keys_become_overrides() -> None:
    pins = parse_pins(["optim.kind=sgd", "compile=true", "tp=2"])
    assert pins.overrides == ("optim.kind=sgd", "compile=true")
    assert list(pins.allowed) == ["tp"]


@pytest.mark.parametrize(
    ("arguments", "fact", "hint"),
    [
        (["tp"], "'tp' is not a pin", "key=value"),
        (["tp="], "'tp=' is not a pin", "key=value"),
        (["tpp=2"], "there is no key 'tpp'", "'tp'"),
        (["vocab_size=2"], "there is no key 'vocab_size'", "model.vocab_size"),
        (["schedule=zbw"], "schedule is 'zbw'", "'zbv'"),
        (["tp=two"], "tp is 'two'", ""),
        (["tp=0"], "tp is 0", "use 1 to"),
        (["zero=4"], "zero is 4", "use 0 to 3"),
        (["tp=2", "parallel.tp=4"], "pinned twice", "tp=2,4"),
    ],
)
def test_wrong_pins_are_errors(arguments: list[str], fact: str, hint: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_pins(arguments)
    assert fact in caught.value.fact
    assert hint in caught.value.hint
