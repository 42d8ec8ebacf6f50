"""The engine behind every "what if": outcomes of one layout, of a search, and of contradictory pins."""

from dataclasses import replace

import numpy as np
import pytest
from tests.support.plans import asked, planned, small_plan

from meshwright.plan.search.pins import parse_pins
from meshwright.plan.search.what_if import Change, fitting, what_if, with_columns


def test_a_layout_that_fits_has_no_reason_against_it() -> None:
    best = small_plan().best
    outcome = what_if(Change("the same", best.question, best.layout))
    assert outcome.fits
    assert outcome.reason == ""
    assert (outcome.device_bytes, outcome.step_seconds) == (best.device_bytes, best.step_seconds)
    assert outcome.text.startswith("the same (")
    assert "per step" in outcome.text


def test_a_broken_rule_is_named() -> None:
    outcome = what_if(with_columns(small_plan().best, "tp=2", tp=2, dp_replicate=4))
    assert not outcome.fits
    assert outcome.reason.startswith("not allowed: ")
    assert "vocab_size=50257" in outcome.text


def test_a_layout_that_does_not_fit_has_its_excess() -> None:
    outcome = what_if(with_columns(planned("llama-3.1-8b", "h100:8x8").best, "zero=2", zero=2))
    assert not outcome.fits
    assert outcome.reason.startswith("does not fit: ")
    assert outcome.reason.endswith("too much")


def test_a_search_gives_its_fastest_layout() -> None:
    question = asked("llama-3.2-1b", "h100:8").question
    outcome = what_if(Change("all", question))
    assert outcome.fits
    assert outcome.step_seconds == pytest.approx(
        planned("llama-3.2-1b", "h100:8").result.fitting.step_seconds.min()
    )


def test_a_search_without_a_fit_gives_the_least_memory() -> None:
    outcome = what_if(Change("all", asked("llama-3.1-8b", "h100:1", "memory.offload=[]").question))
    assert outcome.candidate is not None
    assert not outcome.fits
    assert "too much" in outcome.reason


def test_host_memory_that_is_too_small_is_the_reason() -> None:
    question = asked("llama-3.1-8b", "h100:1", seq=4096, batch_tokens=2**18).question
    small = replace(question, cluster=replace(question.cluster, host_memory_bytes=16 * 2**30))
    assert "of host memory per rank of" in what_if(Change("all", small)).reason


def test_pins_that_leave_no_layout() -> None:
    question = replace(asked("llama-3.1-8b", "h100:8").question, pins=parse_pins(["tp=3"]))
    outcome = what_if(Change("tp=3", question))
    assert outcome.candidate is None
    assert np.isinf(outcome.device_bytes)
    assert outcome.reason == "no layout satisfies the rules and the pins"


def test_only_what_fits_is_given_and_no_more_than_the_limit() -> None:
    best = small_plan().best
    changes = [
        with_columns(best, "tp=2", tp=2, dp_replicate=4),
        with_columns(best, "recompute=full", recompute=32),
        Change("the same", best.question, best.layout),
    ]
    assert [outcome.change.text for outcome in fitting(changes)] == ["recompute=full", "the same"]
    assert [outcome.change.text for outcome in fitting(changes, limit=1)] == ["recompute=full"]
