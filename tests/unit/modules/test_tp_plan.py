"""What of a published tp plan is refused, and what is read from it."""

import pytest
from tests.support.user_modules import decoder, sequential

from meshwright.errors import SpecError
from meshwright.modules.tp_plan import read_tp_plan


def refusal(model, tp: int = 2) -> str:
    with pytest.raises(SpecError) as caught:
        read_tp_plan(model, tp)
    assert caught.value.where == "parallel.tp" and caught.value.hint
    return caught.value.fact


def test_every_layer_of_a_plan_is_found():
    styles = read_tp_plan(decoder("Starcoder2", residual_dropout=0.0, embedding_dropout=0.0), 2)
    assert styles["model.layers.3.mlp.c_proj"] == "rowwise"
    assert styles["lm_head"] == "colwise_gather_output"
    assert styles["model.embed_tokens"] == "embedding_rowwise"
    assert len(styles) == 4 * 6 + 2


def test_modules_without_a_plan():
    assert "Sequential publishes no tp plan" in refusal(sequential())
    assert "StableLmForCausalLM publishes no tp plan" in refusal(decoder("StableLm"))


def test_encoder_and_decoder():
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 8, "d_ff": 8, "d_kv": 4, "num_layers": 1, "num_heads": 2, "vocab_size": 16}
    model = T5ForConditionalGeneration(T5Config(**sizes))
    model._tp_plan = {"lm_head": "colwise_gather_output"}
    assert "has an encoder and a decoder" in refusal(model)


def test_what_does_not_divide():
    assert "tp=4 does not divide the 2 heads of model.layers.0.self_attn.k_proj" in refusal(
        decoder("Gemma2", head_dim=4, vocab_size=40), 4
    )
    assert "tp=2 does not divide the 37 rows of model.embed_tokens" in refusal(
        decoder("Olmo2", vocab_size=37)
    )


def test_norms_that_the_plan_forgets():
    """Their gradients would silently be those of a part of the heads."""
    fact = refusal(decoder("Phi", qk_layernorm=True))
    assert "self_attn.q_layernorm is between matrices that tp shards" in fact


def test_styles_and_parameters_that_are_not_known():
    model = decoder("Olmo2")
    model._tp_plan = {"model.layers.*.mlp.up_proj": "packed_colwise"}
    assert "shards model.layers.0.mlp.up_proj as packed_colwise" in refusal(model)
    model._tp_plan = {"model.layers.*.mlp.up_proj.weight": "colwise"}
    assert "shards the parameter model.layers.0.mlp.up_proj.weight (colwise)" in refusal(model)
    model._tp_plan = {"model.layers.*.self_attn.q_norm": "colwise"}
    assert "is a Olmo2RMSNorm, and colwise shards Linear" in refusal(model)
    model._tp_plan = {"layers.*.mlp.up_proj": "colwise"}
    assert "matches no module of the model" in refusal(model)


def test_dropout():
    assert "self_attn.attention_dropout=0.1" in refusal(decoder("Olmo2", attention_dropout=0.1))
