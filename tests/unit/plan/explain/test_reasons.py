"""The reasons name every technique in use, each with a number."""

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
    assert any(sentence.startswith("tp=8") and "Without it" in sentence for sentence in sentences)
    assert any(
        sentence.startswith("pp=") and "across nodes" in sentence and "bubble" in sentence
        for sentence in sentences
    )
