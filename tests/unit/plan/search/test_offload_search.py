"""Host memory is one more thing to search: taken where nothing fits without it, or where it is faster."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.plans import asked, planned
from tests.support.soak import examples

from meshwright.errors import PlanError
from meshwright.plan.explain.neighbours import neighbours
from meshwright.plan.explain.reasons import explain
from meshwright.plan.make_plan import make_plan
from meshwright.plan.predict import predict_run
from meshwright.plan.search.candidate import with_layout
from meshwright.plan.search.pins import parse_pins
from meshwright.plan.search.search import TIE_FRACTION, search
from meshwright.spec.check import check


def test_what_does_not_fit_on_the_device_fits_with_the_host() -> None:
    plan = planned("llama-3.1-8b", "h100:1", seq=4096)
    assert plan.best.run.memory.offload
    assert check(plan.best.run) == []
    assert predict_run(plan.best.run, plan.question.cluster).fits
    (sentence,) = [each for each in explain(plan) if each.startswith("Offload of")]
    assert "in host memory" in sentence
    against = {each.change: each.reason for each in neighbours(plan)}
    back = next(change for change in against if change.endswith("-> none") and change.startswith("offload="))
    assert "does not fit" in against[back]


def test_nothing_is_offloaded_while_everything_fits_without_recompute() -> None:
    plan = planned("llama-3.1-8b", "h100:8x8")
    assert plan.best.run.memory.recompute == "none"
    assert (plan.result.fitting.layouts.offload == 0).all()


def test_it_is_taken_where_it_is_faster_than_recompute_by_more_than_the_margin() -> None:
    """On 64 devices of 80 GiB, 70B fits with full recompute; offloaded activations need less of it."""
    question = asked("llama-3.1-70b", "dgx-h100:8", seq=8192, batch_tokens=2**22).question
    best = make_plan(question).best
    assert best.run.memory.offload
    on_device = replace(question, pins=parse_pins(["memory.offload=[]"]))
    plain = make_plan(on_device).best
    assert not plain.run.memory.offload
    assert best.step_seconds * (1.0 + TIE_FRACTION) < plain.step_seconds


def test_within_the_margin_everything_stays_on_the_device() -> None:
    plan = planned("llama-3.2-1b", "h100:8", seq=8192, batch_tokens=2**20)
    assert not plan.best.run.memory.offload


def test_a_host_that_is_too_small_does_not_help() -> None:
    question = asked("llama-3.1-8b", "h100:1", seq=4096, batch_tokens=2**18).question
    small = replace(question, cluster=replace(question.cluster, host_memory_bytes=16 * 2**30))
    with pytest.raises(PlanError, match=r"does not fit .* of host memory per rank of .* per node"):
        make_plan(small)
    assert make_plan(question).best.fits


def test_a_pin_decides() -> None:
    pinned = asked(
        "llama-3.1-8b", "h100:8", "memory.offload=optimizer", seq=4096, batch_tokens=2**18
    ).question
    plan = make_plan(pinned)
    best = plan.best
    assert best.run.memory.offload == ("optimizer",)
    assert not pinned.may_offload
    assert not [each for each in neighbours(plan) if each.change.startswith("offload=")]


@examples(6)
@given(
    model=st.sampled_from(["llama-3.2-1b", "llama-3.1-8b", "mixtral-8x7b"]),
    on=st.sampled_from(["rtx4090:1", "rtx4090:4", "h100:1", "a100:2"]),
    pins=st.sampled_from([(), ("optim.ema_decay=0.99",), ("optim.kind=sgd", "optim.beta1=0")]),
    row=st.integers(0, 10**6),
)
def test_every_kept_layout_passes_the_rules(model: str, on: str, pins: tuple[str, ...], row: int) -> None:
    question = asked(model, on, *pins, seq=2048, batch_tokens=2**17).question
    fitting = search(question).fitting
    if len(fitting):
        assert check(with_layout(question.run, fitting.layouts.take([row % len(fitting)]))) == []
