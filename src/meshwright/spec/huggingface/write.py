"""`ModelSpec` -> `config.json` of the family that computes the same; other models are refused."""

from collections.abc import Iterator
from typing import Any, cast

from meshwright.errors import SpecError
from meshwright.spec.huggingface.read import from_config
from meshwright.spec.huggingface.rope import write_rope
from meshwright.spec.model import ModelSpec, MoeSpec

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}


def to_config(model: ModelSpec, *, dtype: str = "float32") -> dict[str, Any]:
    """The Hugging Face config of the family that computes exactly this model."""
    model_type = model_type_of(model)
    _require_experts(model, model_type)
    body = _gpt2(model) if model_type == "gpt2" else _rotary(model, model_type)
    config = {
        "architectures": [_ARCHITECTURES[model_type]],
        "model_type": model_type,
        "torch_dtype": dtype,
        **body,
    }
    _require_same(model, from_config(config, where="model"), model_type)
    return config


def model_type_of(model: ModelSpec) -> str:
    """The Hugging Face family that computes this model, by its features."""
    attention, moe = model.attention, model.moe
    if model.positions == "learned":
        return "gpt2"
    if attention.latent is not None:
        return "deepseek_v3" if moe is not None and moe.score == "sigmoid" else "deepseek_v2"
    if moe is not None:
        return "qwen3_moe" if attention.qk_norm else "mixtral"
    if attention.qk_norm:
        return "qwen3"
    if attention.qkv_bias and not attention.output_bias:
        return "qwen2"
    return "llama" if attention.window is None else "mistral"


def _gpt2(model: ModelSpec) -> dict[str, Any]:
    return {
        "vocab_size": model.vocab_size,
        "n_positions": model.max_positions,
        "n_embd": model.width,
        "n_layer": model.num_layers,
        "n_head": model.attention.num_heads,
        "n_inner": model.mlp.width,
        "activation_function": "gelu" if model.mlp.kind == "gelu" else "gelu_new",
        "resid_pdrop": model.dropout,
        "embd_pdrop": model.dropout,
        "attn_pdrop": model.attention.dropout,
        "layer_norm_epsilon": model.norm_eps,
        "initializer_range": model.init_std,
        "tie_word_embeddings": model.tied_head,
    }


def _rotary(model: ModelSpec, model_type: str) -> dict[str, Any]:
    attention = model.attention
    config: dict[str, Any] = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.width,
        "intermediate_size": model.mlp.width,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "hidden_act": "silu",
        "max_position_embeddings": model.max_positions,
        "initializer_range": model.init_std,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tied_head,
        "attention_dropout": attention.dropout,
        **(write_rope(model.rope) if model.rope else {}),
    }
    if attention.latent is None:
        config["head_dim"] = attention.head_width
    if model_type in ("llama", "qwen3", "qwen3_moe"):
        config["attention_bias"] = attention.qkv_bias
    if model_type == "llama":
        config["mlp_bias"] = model.mlp.bias
    return config | _window(model, model_type) | _moe(model, model_type)


def _window(model: ModelSpec, model_type: str) -> dict[str, Any]:
    window = model.attention.window
    if model_type in ("mistral", "mixtral"):
        return {"sliding_window": window}
    if model_type.startswith("qwen"):
        used = window is not None
        return {"use_sliding_window": used, "sliding_window": window} | (
            {"max_window_layers": 0} if used else {}
        )
    return {}


def _moe(model: ModelSpec, model_type: str) -> dict[str, Any]:
    moe = model.moe
    if moe is None:
        return {}
    if model_type.startswith("deepseek"):
        return _deepseek(model, moe, model_type)
    config: dict[str, Any] = {"num_experts_per_tok": moe.top_k, "router_aux_loss_coef": moe.aux_loss}
    if model_type == "mixtral":
        return config | {"num_local_experts": moe.num_experts, "intermediate_size": moe.width}
    return config | {
        "num_experts": moe.num_experts,
        "moe_intermediate_size": moe.width,
        "norm_topk_prob": moe.normalise_top_k,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _deepseek(model: ModelSpec, moe: MoeSpec, model_type: str) -> dict[str, Any]:
    latent = model.attention.latent
    assert latent is not None
    is_v3 = model_type == "deepseek_v3"
    grouped = "group_limited_greedy" if moe.num_groups > 1 else "greedy"
    return {
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_nope_head_dim": latent.nope_width,
        "qk_rope_head_dim": latent.rope_width,
        "v_head_dim": latent.value_width,
        "attention_bias": False,
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": moe.shared_width // moe.width,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.width,
        "first_k_dense_replace": moe.first_dense_layers,
        "moe_layer_freq": 1,
        "n_group": moe.num_groups,
        "topk_group": moe.top_groups,
        "topk_method": "noaux_tc" if is_v3 else grouped,
        "scoring_func": moe.score,
        "norm_topk_prob": moe.normalise_top_k,
        "routed_scaling_factor": moe.routed_scale,
        "aux_loss_alpha": moe.aux_loss,
        "num_nextn_predict_layers": 0,
    }


def computes_same(model: ModelSpec, other: ModelSpec) -> bool:
    """Whether two models compute the same; training settings may differ."""
    return _computed(model) == _computed(other)


def _require_experts(model: ModelSpec, model_type: str) -> None:
    """Both families with latent attention are of routed experts; a config without them cannot be read."""
    if model.attention.latent is None or model.moe is not None:
        return
    raise SpecError(
        f"the Hugging Face family {model_type} cannot express latent attention (MLA) without routed experts",
        where="model.moe",
        hint="the run directory is read by train, sample and evaluate as it is, and `meshwright convert RUN "
        "FILE.pt` writes its weights for torch.load; a model to be served as a Hugging Face folder needs "
        "model.moe from the start",
    )


def _require_same(model: ModelSpec, back: ModelSpec, model_type: str) -> None:
    """Refuse a config that does not describe the same computation; training settings may differ."""
    lost = list(_differences(_computed(model), _computed(back)))
    if lost:
        fact = f"the Hugging Face family {model_type} cannot express {'; '.join(lost)}"
        raise SpecError(fact, where="model", hint="keep the weights as a checkpoint, or change the model")


def _computed(model: ModelSpec) -> dict[str, Any]:
    plain = model.with_(family="custom", dropout=0.0, scaled_residual_init=True)
    if plain.moe is not None:
        neutral = {"aux_loss": 0.0, "balance_bias_rate": 0.0, "capacity_factor": None}
        plain = plain.with_(moe=plain.moe.with_(**neutral))
    return plain.model_dump()


def _differences(ours: dict[str, Any], back: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in ours.items():
        other = back[key]
        if isinstance(value, dict) and isinstance(other, dict):
            nested = cast(dict[str, Any], value), cast(dict[str, Any], other)
            yield from _differences(*nested, prefix=f"{prefix}{key}.")
        elif value != other:
            yield f"{prefix}{key}={value!r} (it has {other!r})"
