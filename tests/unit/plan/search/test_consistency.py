"""Plans do not refute themselves, refusals do not contradict themselves, more devices are never slower."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.plan_claims import ask, contradictory, self_refuting
from tests.support.plans import asked
from tests.support.soak import examples

from meshwright.errors import MeshwrightError, PlanError
from meshwright.plan.make_plan import make_plan
from meshwright.plan.search.candidate import layout_text
from meshwright.plan.search.sizing import on_devices, planned_step, size_for_deadline

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


@examples(12, derandomize=True)
@given(question=questions)
def test_no_alternative_that_is_named_beats_the_choice(
    question: tuple[str, str, tuple[str, ...], int, int],
) -> None:
    assert_consistent(*question)


@pytest.mark.soak
@pytest.mark.parametrize("part", range(8))
@settings(max_examples=50)
@given(question=questions)
def test_no_alternative_that_is_named_beats_the_choice_in_hundreds_of_questions(
    part: int, question: tuple[str, str, tuple[str, ...], int, int]
) -> None:
    del part  # Each part draws questions of its own.
    assert_consistent(*question)


def test_offload_is_weighed_against_pipelines_and_recompute() -> None:
    """Without tp or pp and with host memory it is faster, so that is the choice."""
    for model, on in (("llama-3.1-8b", "rtx4090:8"), ("mixtral-8x7b", "h100:16")):
        answer = ask(model, on)
        assert not isinstance(answer, MeshwrightError)
        assert answer["best"]["offload"]
        assert self_refuting(answer) == []


def days_on(model: str, on: str, length: int, batch_sequences: int) -> float:
    """Days of the plan; infinite where there is none."""
    answer = ask(model, on, seq=length, batch_tokens=length * batch_sequences)
    return float("inf") if isinstance(answer, MeshwrightError) else answer["best"]["days"]


def test_more_devices_are_never_slower() -> None:
    """Neither the batch nor the preference for simple layouts may make them so."""
    before = float("inf")
    for count in (8, 16, 24, 40, 48):
        answer = ask("llama-3.1-8b", f"h100:{count}")
        assert not isinstance(answer, MeshwrightError)
        assert answer["best"]["days"] <= before * (1.0 + 1e-9)
        before = answer["best"]["days"]


def test_a_pipeline_that_is_slower_simulated_does_not_hide_what_saves_memory() -> None:
    """40 devices: the best in closed form is a pipeline, and 32 of them with offload turn out faster."""
    fewer, most = (ask("qwen3-30b-a3b", f"a100-40gb:{count}") for count in (32, 40))
    assert not isinstance(fewer, MeshwrightError) and not isinstance(most, MeshwrightError)
    assert most["best"]["days"] <= fewer["best"]["days"] * (1.0 + 1e-9)


def test_a_batch_that_does_not_divide_leaves_devices_idle_and_says_so() -> None:
    answer = ask("llama-3.1-8b", "h100:56", seq=8192, batch_tokens=8192 * 64)
    assert not isinstance(answer, MeshwrightError)
    assert answer["best"]["num_ranks"] < 56
    idle = 56 - answer["best"]["num_ranks"]
    assert any(each.startswith(f"{idle} of 56 devices stay idle") for each in answer["why"])


@pytest.mark.soak
@pytest.mark.parametrize("part", range(4))
@settings(max_examples=30)
@given(
    model=st.sampled_from(MODELS),
    device=st.sampled_from(["h100", "a100-40gb", "rtx4090"]),
    nodes=st.integers(1, 20),
    more=st.integers(1, 12),
    batch_sequences=st.sampled_from([64, 96, 512]),
)
def test_more_devices_are_never_slower_in_hundreds_of_questions(
    part: int, model: str, device: str, nodes: int, more: int, batch_sequences: int
) -> None:
    del part
    fewer, most = (
        days_on(model, f"{device}:{8 * count}", 4096, batch_sequences) for count in (nodes, nodes + more)
    )
    assert most <= fewer * (1.0 + 1e-9)


def assert_smallest(model: str, device: str, days: float) -> None:
    """The plan of a deadline is in time, is that of its number of devices, and one node less is too late."""
    question = asked(model, device, seq=8192, batch_tokens=2**22).question
    tokens, seconds = 10**11, days * 86400.0
    try:
        sized = size_for_deadline(question, tokens=tokens, deadline_seconds=seconds, open_ended=True)
    except PlanError:
        return
    count = sized.cluster.num_devices
    plan = make_plan(sized)
    assert plan.best.days(tokens) <= days
    same = make_plan(asked(model, f"{device}:{count}", seq=8192, batch_tokens=2**22).question)
    assert layout_text(same.best.run) == layout_text(plan.best.run)
    per_node = question.cluster.devices_per_node
    fewer = count - (per_node if count > per_node else 1)
    if fewer:
        smaller, _ = planned_step(on_devices(question, fewer))
        assert smaller * tokens / 2**22 > seconds


def test_a_deadline_gives_the_smallest_count_and_its_plan() -> None:
    assert_smallest("llama-3.1-8b", "h100", 12.0)


@pytest.mark.soak
@pytest.mark.parametrize("part", range(4))
@settings(max_examples=10)
@given(
    model=st.sampled_from(("llama-3.2-1b", "llama-3.1-8b", "qwen2.5-32b", "mixtral-8x7b")),
    device=st.sampled_from(["h100", "a100", "b200"]),
    days=st.floats(2.0, 60.0),
)
def test_deadlines_give_the_smallest_count_and_its_plan(
    part: int, model: str, device: str, days: float
) -> None:
    del part
    assert_smallest(model, device, days)
