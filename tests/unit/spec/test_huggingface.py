"""Configs as they are published become specs, and what cannot be computed is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from meshwright.errors import SpecError
from meshwright.spec import RunSpec
from meshwright.spec.check import check
from meshwright.spec.data import DataSpec, SyntheticSpec
from meshwright.spec.families import FAMILIES, family
from meshwright.spec.huggingface import from_config, load_model, to_config
from meshwright.spec.parameters import num_parameters
from meshwright.spec.schedule import ScheduleSpec

LLAMA_31_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {"fmt": "e4m3", "quant_method": "fp8"},
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
QWEN25_7B: dict[str, Any] = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 18944,
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}


def _same_model(found: Any, name: str) -> bool:
    expected = family(name)
    if expected.moe is not None:  # coefficients of training that its config does not say
        balancing = {"aux_loss": 0.0, "balance_bias_rate": 0.0}
        expected = expected.with_(moe=expected.moe.with_(**balancing))
        found = found.with_(moe=found.moe.with_(**balancing))
    return found.with_(family=name) == expected


@pytest.mark.parametrize(
    ("config", "name"),
    [(LLAMA_31_8B, "llama-3.1-8b"), (DEEPSEEK_V3, "deepseek-v3"), (QWEN25_7B, "qwen2.5-7b")],
)
def test_published_configs_are_the_families(config: dict[str, Any], name: str) -> None:
    assert _same_model(from_config(config), name)


def test_deepseek_v3_with_one_group_of_experts_is_valid() -> None:
    """As Moonlight and Kimi K2 have it."""
    model = from_config(DEEPSEEK_V3 | {"n_group": 1, "topk_group": 1})
    assert model.moe is not None and model.moe.group_score == "max"
    run = RunSpec(
        model=model,
        schedule=ScheduleSpec(num_steps=1),
        data=DataSpec(synthetic=SyntheticSpec(), sequence_length=8, batch_sequences=1),
    )
    assert not check(run)
    assert from_config(to_config(model)) == model


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_survives_the_way_out_and_back(name: str) -> None:
    assert _same_model(from_config(to_config(family(name))), name)


@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_builds_the_same_number_of_parameters(name: str, tmp_path: Path) -> None:
    """Its own code, on the meta device, from the config we write."""
    (tmp_path / "config.json").write_text(json.dumps(to_config(family(name))))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config)
    assert sum(parameter.numel() for parameter in theirs.parameters()) == num_parameters(family(name))


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-8b", "mixtral-8x7b", "deepseek-v3", "gpt2-124m"])
def test_what_transformers_saves_is_understood(name: str, tmp_path: Path) -> None:
    """Its newer key for the rotary settings included."""
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "config.json").write_text(json.dumps(to_config(family(name))))
    transformers.AutoConfig.from_pretrained(tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    saved = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert name == "gpt2-124m" or "rope_parameters" in saved
    assert _same_model(load_model(str(tmp_path / "theirs")), name)


def test_a_stock_gpt2_config_keeps_its_dropouts() -> None:
    stock = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_ctx": 1024}
    model = from_config({**stock, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.2})
    assert (model.dropout, model.attention.dropout) == (0.1, 0.2)
    assert num_parameters(model) == 124_439_808


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"use_sliding_window": False, "sliding_window": 99}, None),
        ({"use_sliding_window": True, "sliding_window": 99, "max_window_layers": 0}, 99),
        ({"layer_types": ["full_attention"] * 28, "sliding_window": 99}, None),
        ({"layer_types": ["sliding_attention"] * 28, "sliding_window": 99}, 99),
    ],
)
def test_qwen_windows_count_only_when_used(changes: dict[str, Any], window: int | None) -> None:
    assert from_config({**QWEN25_7B, **changes}).attention.window == window


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"hidden_act": "gelu"}, 'hidden_act="gelu" is not supported'),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2}}, "'longrope' is not supported"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2, "attention_factor": 3.0}}, "attention_factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2, "mscale_all_dim": 1.0}}, "mscale_all_dim"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ({"num_hidden_layers": -1}, "num_layers"),
        ({"num_hidden_layers": "many"}, "num_layers"),
        ({"hidden_size": 4097}, "32 heads do not divide the width 4097"),
        ({"vocab_size": None}, "vocab_size is missing"),
    ],
)
def test_what_would_change_the_computation_is_refused(changes: dict[str, Any], fact: str) -> None:
    with pytest.raises(SpecError) as caught:
        from_config({**LLAMA_31_8B, **changes}, where="there/config.json")
    assert fact in caught.value.fact
    assert caught.value.where == "there/config.json" and caught.value.hint


def test_mixed_windows_are_refused() -> None:
    layer_types = ["full_attention", "sliding_attention"] * 14
    with pytest.raises(SpecError, match="some layers have a sliding window"):
        from_config({**QWEN25_7B, "layer_types": layer_types})


def test_a_misspelt_key_suggests_the_right_one() -> None:
    with pytest.raises(SpecError) as caught:
        from_config({**LLAMA_31_8B, "rms_norm_epss": 1e-3})
    assert "rms_norm_eps" in caught.value.hint


def test_an_unknown_model_type_suggests_the_nearest() -> None:
    with pytest.raises(SpecError, match="model_type 'qwen_2' is not supported") as caught:
        from_config({"model_type": "qwen_2"})
    assert "qwen2" in caught.value.hint


@pytest.mark.parametrize("kind", ["gemma2", "phi3", "olmo2", "gpt_neox", "starcoder2", "t5", "bert", "vit"])
def test_an_unsupported_config_says_how_the_model_can_be_trained(kind: str) -> None:
    with pytest.raises(SpecError, match=f"model_type '{kind}' is not supported") as caught:
        from_config({"model_type": kind})
    assert "meshwright.fit" in caught.value.hint and "docs/guides/own_model.md" in caught.value.hint


def test_load_model_takes_a_name_a_file_or_a_folder(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA_31_8B))
    assert load_model("llama-3.1-8b") is family("llama-3.1-8b")
    assert load_model(str(file)) == load_model(str(tmp_path))
    assert _same_model(load_model(str(file)), "llama-3.1-8b")


@pytest.mark.parametrize("content", ["{", "[1]", "null", '"x"', "{}", '{"model_type": 7}', "\x00"])
def test_a_broken_file_is_a_fact(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(SpecError) as caught:
        load_model(str(tmp_path))
    assert caught.value.where.endswith("config.json") and caught.value.hint


def test_a_missing_file_is_a_fact(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="No such file"):
        load_model(str(tmp_path / "config.json"))
    with pytest.raises(SpecError, match="No such file"):
        load_model(str(tmp_path))


def test_what_no_family_can_express_is_refused_by_field() -> None:
    model = family("llama-3.1-8b")
    mixed = model.with_(mlp=model.mlp.with_(kind="gelu"))
    with pytest.raises(SpecError, match=r"cannot express mlp\.kind='gelu'"):
        to_config(mixed)


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "deepseek-v3"])
def test_latent_attention_without_experts_names_the_forms_that_can_be_written(name: str) -> None:
    dense = family(name).with_(moe=None)
    with pytest.raises(SpecError, match="latent attention \\(MLA\\) without routed experts") as refused:
        to_config(dense)
    assert refused.value.where == "model.moe" and "`meshwright convert RUN FILE.pt`" in refused.value.hint
