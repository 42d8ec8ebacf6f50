"""The reasons name every technique in use, each with a number."""

import re

from tests.support.plans import planned, small_plan

from meshwright.plan.explain.reasons import explain


def test_the_reasons_follow_the_techniques() -> None:
    text = " ".join(explain(small_plan()))
    assert "The full state fits on one GPU: DDP over 8 ranks is fastest" in text
    assert "you do not need" in text
    text = " ".join(explain(planned("llama-3.1-8b", "h100:8x8")))
    assert "does not fit on one" in text
    assert "ZeRO-3: optimizer states, gradients and weights are sharded over 64 ranks" in text


def test_every_technique_in_use_is_justified_with_a_number() -> None:
    sentences = explain(planned("llama-3.1-405b", "h100:8x2048", batch_tokens=2**24))
    assert any(
        sentence.startswith("tp=8") and "inside the 8 GPUs" in sentence and "Without it" in sentence
        for sentence in sentences
    )
    assert any(
        sentence.startswith("pp=") and "across nodes" in sentence and "bubble" in sentence
        for sentence in sentences
    )


def test_a_layout_that_a_sentence_names_is_a_row_or_has_a_pin_that_shows_it() -> None:
    plan = planned("mixtral-8x7b", "h100:16", batch_tokens=2**22)
    for sentence in explain(plan):
        assert ("Without it the best step" in sentence) == bool(
            re.search(r"\((row \d|the pin \w+=1 )", sentence)
        )
    times = [candidate.step_seconds for candidate in plan.top[1:]]
    assert times == sorted(times)


def test_what_offload_assumes_is_said() -> None:
    """It was measured on one device with a host of its own."""
    alone, shared = planned("llama-3.1-8b", "h100:1", seq=4096), planned("mixtral-8x7b", "h100:16")
    assert alone.best.run.memory.offload
    assert shared.best.run.memory.offload
    assert "Not measured" not in " ".join(explain(alone))
    text = " ".join(explain(shared))
    assert "Not measured: each of 8 devices of a node is assumed to get 0.5 of its link to the host" in text


def test_a_routed_model_without_ep_says_why() -> None:
    """What ZeRO-3 gathers instead, what an exchange would cost, and the best layout with ep, as a row."""
    plan = planned("qwen3-30b-a3b", "h100:32")
    assert plan.best.run.parallel.ep == 1
    (sentence,) = [each for each in explain(plan) if each.startswith("ep=1:")]
    assert "ZeRO-3 gathers all experts of a layer (1.1 GiB) once per pass over 131K tokens" in sentence
    assert re.search(r"With ep=\d+ ranks exchange tokens, [\d.]+ m?s per step exposed", sentence)
    assert plan.with_ep is not None
    with_ep = [one.step_seconds for one in plan.top if one.run.parallel.ep > 1]
    assert plan.with_ep.step_seconds <= min(with_ep)
    assert "ep=1:" not in " ".join(explain(planned("qwen3-30b-a3b", "h100:32", "ep=1")))
    assert "ep=1:" not in " ".join(explain(small_plan()))


def test_a_routed_model_in_fp8_says_why_its_experts_are_not() -> None:
    pin = "precision.fp8=current"
    assert "Routed experts stay in bf16" in " ".join(explain(planned("mixtral-8x7b", "h100:16", pin)))
    assert "Routed experts" not in " ".join(explain(planned("llama-3.1-8b", "h100:8", pin)))
