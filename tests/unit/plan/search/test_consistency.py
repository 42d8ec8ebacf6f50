"""Plans do not refute themselves, refusals do not contradict themselves, more devices are never slower."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.plan_claims import ask, contradictory, self_refuting

from meshwright.errors import MeshwrightError

MODELS = ("llama-3.2-1b", "llama-3.1-8b", "qwen2.5-32b", "mixtral-8x7b", "qwen3-30b-a3b")
CLUSTERS = ("rtx4090:1", "rtx4090:8", "a100-40gb:8", "leonardo:4", "h100:1", "h100:8", "h100:24", "gh200:1x4")
PINS = ((), ("memory.offload=[]",), ("pp=2",), ("recompute=full",), ("compile=false",))

questions = st.tuples(
    st.sampled_from(MODELS),
    st.sampled_from(CLUSTERS),
    st.sampled_from(PINS),
    st.sampled_from([2048, 8192, 32768]),
    st.sampled_from([64, 96, 512]),
)


def assert_consistent(model: str, on: str, pins: tuple[str, ...], length: int, batch_sequences: int) -> None:
    """Nothing that the answer names beats it, and nothing that fits is said not to."""
    answer = ask(model, on, *pins, seq=length, batch_tokens=length * batch_sequences)
    assert contradictory(answer) == []
    if not isinstance(answer, MeshwrightError):
        assert self_refuting(answer) == []


@settings(max_examples=12, deadline=None, derandomize=True)
@given(question=questions)
def test_no_alternative_that_is_named_beats_the_choice(
    question: tuple[str, str, tuple[str, ...], int, int],
) -> None:
    assert_consistent(*question)


@pytest.mark.soak
@settings(max_examples=400, deadline=None)
@given(question=questions)
def test_no_alternative_that_is_named_beats_the_choice_in_hundreds_of_questions(
    question: tuple[str, str, tuple[str, ...], int, int],
) -> None:
    assert_consistent(*question)


def test_offload_is_weighed_against_pipelines_and_recompute() -> None:
    """Without tp or pp and with host memory it is faster, so that is the choice."""
    for model, on in (("llama-3.1-8b", "rtx4090:8"), ("mixtral-8x7b", "h100:16")):
        answer = ask(model, on)
        assert not isinstance(answer, MeshwrightError)
        assert answer["best"]["offload"]
        assert self_refuting(answer) == []


def test_more_devices_are_never_slower() -> None:
    """Neither the batch nor the preference for simple layouts may make them so."""
    before = float("inf")
    for count in (8, 16, 24, 40, 48):
        answer = ask("llama-3.1-8b", f"h100:{count}")
        assert not isinstance(answer, MeshwrightError)
        assert answer["best"]["days"] <= before * (1.0 + 1e-9)
        before = answer["best"]["days"]
