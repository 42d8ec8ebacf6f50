"""Formats and optimizer are changed only where it is allowed, as little as does it, and told with numbers."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.plans import asked

from meshwright.errors import PlanError, SpecError
from meshwright.hardware.catalogue import parse_cluster
from meshwright.plan.explain.offers import offers
from meshwright.plan.explain.reasons import explain
from meshwright.plan.explain.relax import plan_or_relax
from meshwright.plan.search.allow import (
    BY_NAME_ONLY,
    NUMERICS_CHANGES,
    WORDS,
    corners,
    parse_allow,
    reject_pinned,
    single_changes,
    variants,
)
from meshwright.plan.search.choose_precision import choose_precision
from meshwright.plan.search.decision import Plan, choose, make_plan
from meshwright.plan.search.pins import parse_pins
from meshwright.plan.search.question import Question
from meshwright.plan.search.request import Request, fill_request
from meshwright.plan.search.search import TIE_FRACTION
from meshwright.plan.search.sizing import size_for_deadline
from meshwright.spec.check import check
from meshwright.spec.run import RunSpec

H100 = parse_cluster("h100:8").device
HERE = "memory.offload=[]"
"""Nothing on the host."""


def question(model: str, on: str, allow: str, *pins: str, seq: int = 4096, batch: int = 2**18) -> Question:
    base = asked(model, on, *pins, seq=seq, batch_tokens=batch).question
    return replace(base, allow=parse_allow(allow))


def run_of(*pins: str) -> RunSpec:
    return asked("llama-3.1-8b", "h100:8", *pins).question.run


def test_words_of_the_command_line() -> None:
    assert parse_allow(None) == parse_allow("") == ()
    assert parse_allow("fp8, bf16_weights") == ("bf16_weights", "fp8")
    assert set(parse_allow("all")) == set(WORDS) - set(BY_NAME_ONLY)
    assert "sgd" in parse_allow("all,sgd")
    with pytest.raises(SpecError, match="fp9") as error:
        parse_allow("fp9")
    assert "did you mean 'fp8'" in str(error.value)


def test_every_change_is_a_valid_setting() -> None:
    for allowance in NUMERICS_CHANGES:
        word = (allowance.word, "bf16_weights")
        listed = variants(run_of(), word, (), H100)
        assert any(allowance in variant.changes for variant in listed), allowance.word
        assert all(not check(variant.run) for variant in listed)


def test_what_the_rules_refuse_is_no_variant() -> None:
    listed = variants(run_of(), ("bf16_gradients", "bf16_moments", "adamw_8bit"), (), H100)
    # Gradients follow the weights, and 8-bit moments have no other format.
    assert [tuple(change.word for change in each.changes) for each in listed] == [
        (),
        ("bf16_moments",),
        ("adamw_8bit",),
    ]


def test_pins_fix_and_devices_without_fp8_have_none() -> None:
    pins = ("precision.weights=fp32", "optim.kind=adamw")
    words = parse_allow("all")
    keys = {change.key for each in variants(run_of(), words, pins, H100) for change in each.changes}
    assert keys == {"optim.state", "precision.fp8"}
    ampere = parse_cluster("a100:8").device
    assert all(each.run.precision.fp8 is None for each in variants(run_of(), words, (), ampere))
    with pytest.raises(SpecError, match="has no effect"):
        reject_pinned("bf16_weights", pins)
    reject_pinned("all", pins)


def test_a_run_that_says_it_is_left_alone() -> None:
    run = run_of("precision.weights=bf16_exact", "optim.state=bf16")
    keys = {each.changes[0].key for each in single_changes(run, (), (), H100)}
    assert keys == {"precision.gradients", "optim.kind", "precision.fp8"} - {"optim.kind"}


def test_corners_are_the_leanest_of_every_kind() -> None:
    listed = variants(run_of(), (*parse_allow("all"), "adafactor"), (), H100)
    found = {(each.run.optim.kind, bool(each.run.precision.fp8)): each for each in corners(listed)[1:]}
    assert len(found) == 6
    assert found["adamw", True].run.precision.weights == "bf16_stochastic"
    assert found["adamw", True].run.optim.state == "bf16"
    assert corners(listed)[0].run == run_of()


def test_nothing_changes_without_permission() -> None:
    plan = make_plan(question("llama-3.1-8b", "h100:8", ""))
    assert plan.changes == ()
    assert plan.best.run.precision.fp8 is None


def test_fp8_is_taken_when_it_is_faster_and_told() -> None:
    plain = make_plan(question("llama-3.1-8b", "h100:8", ""))
    plan = make_plan(question("llama-3.1-8b", "h100:8", "fp8"))
    assert plan.best.run.precision.fp8 is not None
    assert plan.best.step_seconds < 0.95 * plain.best.step_seconds
    assert any("precision.fp8=current, as allowed" in sentence for sentence in explain(plan))
    (offer, *_) = offers(plain)
    assert offer.word == "fp8"
    assert offer.step_seconds == pytest.approx(plan.found.fitting.step_seconds.min(), rel=0.05)
    assert "with --allow fp8" in offer.text
    assert not [each for each in offers(plan) if each.word == "fp8"]


def test_the_least_change_that_fits_is_taken() -> None:
    """8B on one H200: weights, gradients and moments of 16 bytes do not fit, some of them in bf16 do."""
    plan = make_plan(question("llama-3.1-8b", "h200:1", "bf16_weights,bf16_gradients,bf16_moments", HERE))
    assert 0 < len(plan.changes) <= 3
    for change in plan.changes:
        fewer = ",".join(each.word for each in plan.changes if each != change)
        found = choose_precision(question("llama-3.1-8b", "h200:1", fewer, HERE)).found
        seconds = found.fitting.step_seconds.min() if len(found.fitting) else np.inf
        assert seconds > (1 + TIE_FRACTION) * plan.found.fitting.step_seconds.min() or len(found.fitting) == 0


def test_what_is_not_needed_is_not_taken() -> None:
    plan = make_plan(question("llama-3.2-1b", "h100:8", "bf16_weights,bf16_gradients,bf16_moments"))
    assert plan.changes == ()
    assert any("Allowed and not taken" in sentence for sentence in explain(plan))


def test_nothing_fits_names_the_formats_that_would() -> None:
    with pytest.raises(PlanError) as error:
        plan_or_relax(question("llama-3.1-8b", "h100:1", "", HERE))
    assert "--allow " in error.value.hint
    words = error.value.hint.split("--allow ")[1].split(" (")[0].split(":")[0]
    assert make_plan(question("llama-3.1-8b", "h100:1", words, HERE)).best.fits


def test_a_deadline_is_met_with_fewer_devices_in_narrower_formats() -> None:
    def devices(allow: str) -> int:
        asks = question("llama-3.1-8b", "h100:512", allow, batch=2**22)
        sized = size_for_deadline(asks, tokens=10**12, deadline_seconds=20 * 86400.0, open_ended=False)
        return sized.cluster.num_devices

    assert devices("fp8") < devices("")


@settings(max_examples=8, deadline=None)
@given(
    model=st.sampled_from(["llama-3.2-1b", "mixtral-8x7b", "llama-3.1-8b"]),
    on=st.sampled_from(["h100:1", "h200:1", "h100:8", "leonardo:2"]),
    words=st.sets(st.sampled_from(WORDS)),
    more=st.sets(st.sampled_from(WORDS)),
)
def test_what_is_allowed_more_never_makes_the_best_plan_slower(
    model: str, on: str, words: set[str], more: set[str]
) -> None:
    """On the devices alone: offload is a preference, not only a matter of time."""

    def found(allow: set[str]) -> tuple[float, Plan | None]:
        settled = choose_precision(question(model, on, ",".join(sorted(allow)), HERE, seq=2048))
        fits = len(settled.found.fitting) > 0
        return settled.best_score, choose(settled, top=1, search_seconds=0.0) if fits else None

    small, plan = found(words)
    large, larger_plan = found(words | more)
    assert large <= small * (1 + 1e-12)
    for each in (plan, larger_plan):
        if each is not None:
            assert check(each.best.run) == []
            assert each.best.fits
            assert {change.word for change in each.changes} <= words | more
    if larger_plan is not None:
        closest = larger_plan.found.fitting.step_seconds.min()
        assert closest <= large * (1 + TIE_FRACTION) * (1 + 1e-12)


def test_compiled_by_default_on_accelerators() -> None:
    def compiles(on: str, *pins: str) -> bool:
        request = Request("llama-3.2-1b", parse_cluster(on), parse_pins(pins), sequence_length=2048)
        return fill_request(request).question.run.compile

    assert compiles("h100:8")
    assert not compiles("h100:8", "compile=false")
    assert not compiles("h100:8", "schedule=zbv")
    assert compiles("h100:8", "schedule=zbv,1f1b")
    assert not compiles("cpu:4")


def test_precision_fp8_means_linears_in_fp8() -> None:
    def asks(on: str) -> RunSpec:
        request = Request("llama-3.2-1b", parse_cluster(on), parse_pins(()), 2048, precision="fp8")
        return fill_request(request).question.run

    precision = asks("h100:8").precision
    assert precision.compute == "bf16"
    assert precision.fp8 is not None
    assert precision.fp8.recipe == "current"
    with pytest.raises(SpecError, match="no fp8 rate"):
        asks("a100:8")
