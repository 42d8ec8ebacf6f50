"""Formats and optimizer change only where it is allowed, as little as is enough, and with numbers."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.plans import asked
from tests.support.soak import examples

from meshwright.errors import PlanError, SpecError
from meshwright.hardware.catalogue import parse_cluster
from meshwright.plan.explain.gains import gains
from meshwright.plan.explain.reasons import explain
from meshwright.plan.make_plan import make_plan
from meshwright.plan.search.allow import (
    BY_NAME_ONLY,
    NAMES,
    NUMERICS_CHANGES,
    Variant,
    corners,
    parse_allow,
    reject_pinned,
    single_changes,
    variants,
)
from meshwright.plan.search.choose_precision import choose_precision
from meshwright.plan.search.decision import Plan, choose
from meshwright.plan.search.pins import parse_pins
from meshwright.plan.search.question import Question
from meshwright.plan.search.request import Request, fill_request
from meshwright.plan.search.search import TIE_FRACTION
from meshwright.plan.search.sizing import size_for_deadline
from meshwright.spec.check import check
from meshwright.spec.run import RunSpec

HERE = "memory.offload=[]"
"""Nothing on the host."""


def question(model: str, on: str, allow: str, *pins: str, seq: int = 4096, batch: int = 2**18) -> Question:
    base = asked(model, on, *pins, seq=seq, batch_tokens=batch).question
    return replace(base, allow=parse_allow(allow))


def listed(allow: str, *pins: str, on: str = "h100:8") -> list[Variant]:
    return variants(question("llama-3.1-8b", on, allow, *pins))


def test_names_on_the_command_line() -> None:
    assert parse_allow(None) == parse_allow("") == ()
    assert parse_allow("fp8, bf16_weights") == ("bf16_weights", "fp8")
    assert set(parse_allow("all")) == set(NAMES) - set(BY_NAME_ONLY)
    assert "sgd" in parse_allow("all,sgd")
    with pytest.raises(SpecError, match="fp9") as error:
        parse_allow("fp9")
    assert "did you mean 'fp8'" in str(error.value)


def test_every_change_is_a_valid_setting() -> None:
    for change in NUMERICS_CHANGES:
        found = listed(f"{change.name},bf16_weights")
        assert any(change in variant.changes for variant in found), change.name
        assert all(not check(variant.question.run) for variant in found)


def test_what_the_rules_forbid_is_no_variant() -> None:
    found = listed("bf16_gradients,bf16_moments,adamw_8bit")
    # Gradients follow the weights, and 8-bit moments have no other format.
    assert [tuple(change.name for change in each.changes) for each in found] == [
        (),
        ("bf16_moments",),
        ("adamw_8bit",),
    ]


def test_pins_fix_and_devices_without_fp8_have_none() -> None:
    pins = ("precision.weights=fp32", "optim.kind=adamw")
    keys = {change.key for each in listed("all", *pins) for change in each.changes}
    assert keys == {"optim.state", "precision.fp8"}
    assert all(each.question.run.precision.fp8 is None for each in listed("all", on="a100:8"))
    with pytest.raises(SpecError, match="has no effect"):
        reject_pinned("bf16_weights", parse_pins(pins))
    reject_pinned("all", parse_pins(pins))


def test_values_that_the_run_sets_stay() -> None:
    asks = question("llama-3.1-8b", "h100:8", "", "precision.weights=bf16_exact", "optim.state=bf16")
    unpinned = replace(asks, pins=parse_pins([]))
    keys = {each.changes[0].key for each in single_changes(unpinned)}
    assert keys == {"precision.gradients", "precision.fp8"}


def test_corners_have_the_least_state_of_every_kind() -> None:
    asks = question("llama-3.1-8b", "h100:8", "all,adafactor")
    first, *others = corners(variants(asks))
    runs = {(run.optim.kind, bool(run.precision.fp8)): run for run in (each.question.run for each in others)}
    assert len(runs) == 6
    assert runs["adamw", True].precision.weights == "bf16_stochastic"
    assert runs["adamw", True].optim.state == "bf16"
    assert first.question.run == asks.run


def test_nothing_changes_without_permission() -> None:
    plan = make_plan(question("llama-3.1-8b", "h100:8", ""))
    assert plan.changes == ()
    assert plan.best.run.precision.fp8 is None


def test_fp8_is_used_when_it_is_faster_and_explained() -> None:
    plain = make_plan(question("llama-3.1-8b", "h100:8", ""))
    plan = make_plan(question("llama-3.1-8b", "h100:8", "fp8"))
    assert plan.best.run.precision.fp8 is not None
    assert plan.best.step_seconds < 0.95 * plain.best.step_seconds
    assert any("precision.fp8=current, as allowed" in sentence for sentence in explain(plan))
    (gain, *_) = gains(plain)
    assert gain.name == "fp8"
    assert gain.step_seconds == pytest.approx(plan.result.fitting.step_seconds.min(), rel=0.05)
    assert "with --allow fp8" in gain.text
    assert not [each for each in gains(plan) if each.name == "fp8"]


def test_the_least_change_that_fits_is_used() -> None:
    """8B on one H200: fewer changes do not fit, or take longer than a tie with the best that is allowed."""
    asked_for = question("llama-3.1-8b", "h200:1", "bf16_weights,bf16_gradients,bf16_moments", HERE)
    plan, best = make_plan(asked_for), choose_precision(asked_for).best_score
    assert [change.name for change in plan.changes] == ["bf16_weights", "bf16_moments"]
    for change in plan.changes:
        fewer = ",".join(each.name for each in plan.changes if each != change)
        found = choose_precision(question("llama-3.1-8b", "h200:1", fewer, HERE)).result
        seconds = found.fitting.step_seconds.min() if len(found.fitting) else np.inf
        assert seconds > (1 + TIE_FRACTION) * best or len(found.fitting) == 0


def test_what_is_not_needed_is_not_used() -> None:
    plan = make_plan(question("llama-3.2-1b", "h100:8", "bf16_weights,bf16_gradients,bf16_moments"))
    assert plan.changes == ()
    assert any("Allowed but not used" in sentence for sentence in explain(plan))


def test_nothing_fits_names_the_formats_that_would() -> None:
    with pytest.raises(PlanError) as error:
        make_plan(question("llama-3.1-8b", "h100:1", "", HERE))
    assert "--allow " in error.value.hint
    names = error.value.hint.split("--allow ")[1].split(" (")[0].split(":")[0]
    assert make_plan(question("llama-3.1-8b", "h100:1", names, HERE)).best.fits


def test_a_deadline_is_met_with_fewer_devices_in_smaller_formats() -> None:
    def devices(allow: str) -> int:
        asks = question("llama-3.1-8b", "h100:512", allow, batch=2**22)
        sized = size_for_deadline(asks, tokens=10**12, deadline_seconds=20 * 86400.0, open_ended=False)
        return sized.cluster.num_devices

    assert devices("fp8") < devices("")


@examples(3)
@given(
    model=st.sampled_from(["llama-3.2-1b", "mixtral-8x7b", "llama-3.1-8b"]),
    on=st.sampled_from(["h100:1", "h200:1", "h100:8", "leonardo:2"]),
    names=st.sets(st.sampled_from(NAMES)),
    more=st.sets(st.sampled_from(NAMES)),
)
def test_what_is_allowed_more_never_makes_the_best_plan_slower(
    model: str, on: str, names: set[str], more: set[str]
) -> None:
    """On the devices alone: offload is a preference, not only a matter of time."""

    def found(allow: set[str]) -> tuple[float, Plan | None]:
        chosen = choose_precision(question(model, on, ",".join(sorted(allow)), HERE, seq=2048))
        fits = len(chosen.result.fitting) > 0
        return chosen.best_score, choose(chosen, top=1, search_seconds=0.0) if fits else None

    small, plan = found(names)
    large, larger_plan = found(names | more)
    assert large <= small * (1 + 1e-12)
    for each in (plan, larger_plan):
        if each is not None:
            assert check(each.best.run) == []
            assert each.best.fits
            assert {change.name for change in each.changes} <= names | more
    if larger_plan is not None:
        closest = larger_plan.result.fitting.step_seconds.min()
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
