"""Hugging Face `config.json` -> `ModelSpec`.

A key that changes the computation in a way that the decoder does not support is refused, never
skipped. Keys that only concern generation, storage or other libraries are inert (config_reader.py).
"""

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from meshwright.errors import SpecError
from meshwright.files import MIB, read_json_file
from meshwright.spec.families import FAMILIES, family, is_family
from meshwright.spec.hub_ids import hub_id_of
from meshwright.spec.huggingface.config_reader import Config, ConfigReader
from meshwright.spec.huggingface.rope import read_rope
from meshwright.spec.model import AttentionSpec, LatentSpec, MlpSpec, ModelSpec, MoeSpec

_MAX_CONFIG_BYTES = 4 * MIB
# Read by every family with rotary positions.
_ROTARY_KEYS = frozenset({"rope_theta", "rope_scaling", "rope_parameters"})
_OTHER_DOOR = (
    "Any other model of transformers is trained as a module of yours: meshwright.fit(model, dataset, loss, "
    "...), with ZeRO, recompute and, for decoders, the tp, cp and pp plans that it publishes "
    "(docs/guides/own_model.md). `meshwright plan` and `predict` trace and price decoders, encoders, "
    "encoder-decoders and vision transformers"
)
_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}


def load_model(text: str) -> ModelSpec:
    """The model of a name: a family, its hub id, a `config.json`, or a folder that has one."""
    path = Path(text).expanduser()
    is_name = text.strip().lower() in FAMILIES
    if is_family(text) and not (path.is_file() or (path.is_dir() and not is_name)):
        return family(text)
    if path.suffix != ".json" and not path.exists():
        if "/" in text and hub_id_of(text) is None:
            hint = "give a family name, a config.json or a folder that holds one"
            raise SpecError(f"there is no folder {text!r}", where="model", hint=hint)
        return family(text)
    return model_at(path)


def model_at(path: Path) -> ModelSpec:
    """The model of a `config.json` or of its folder, also where the folder has the name of a family."""
    file = path / "config.json" if path.is_dir() else path
    return from_config(_read_json(file), str(file))


def is_external_config(path: Path) -> bool:
    """Whether this is the config.json, or its folder, of a model type that is none of our families."""
    file = path / "config.json" if path.is_dir() else path
    if file.suffix != ".json" or not file.is_file():
        return False
    return str(_read_json(file).get("model_type", "")) not in {"", *_FROM}


def _read_json(path: Path) -> Config:
    try:
        content = read_json_file(path, max_bytes=_MAX_CONFIG_BYTES)
    except OSError as error:
        hint = "give a family name, a config.json or a folder that holds one"
        raise SpecError(f"cannot read the file: {error.strerror}", where=str(path), hint=hint) from None
    except ValueError as error:
        raise SpecError(
            f"not JSON: {error}", where=str(path), hint="expected a model's config.json"
        ) from None
    if not isinstance(content, dict):
        raise SpecError("not a JSON object", where=str(path), hint="expected a model's config.json")
    return cast(Config, content)


def from_config(config: Config, where: str = "config.json") -> ModelSpec:
    """The model spec of a Hugging Face config."""
    model_type = str(config.get("model_type", ""))
    if model_type not in _FROM:
        near = difflib.get_close_matches(model_type, _FROM, n=1)
        known = f"did you mean {near[0]}? known are" if near else "known are"
        hint = f"{known} {', '.join(_FROM)}. {_OTHER_DOOR}"
        raise SpecError(f"model_type {model_type!r} is not supported", where=where, hint=hint)
    reader = ConfigReader(config, where)
    try:
        model = _FROM[model_type](reader)
    except (ValidationError, TypeError, ValueError, ZeroDivisionError) as error:
        raise SpecError(_first_line(error), where=where, hint="correct the value in the config") from None
    reader.refuse_the_rest()
    return model


def _first_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        return f"{place}: {first['msg']} (got {first['input']!r})"
    return f"a value has the wrong type: {error}"


# ---- one function per family ---------------------------------------------------------------------


def _llama(reader: ConfigReader) -> ModelSpec:
    bias = reader.get("attention_bias", False)
    attention = _attention(reader, qkv_bias=bias, output_bias=bias)
    mlp = _swiglu(reader, bias=reader.get("mlp_bias", False))
    return _rotary_model(reader, attention=attention, mlp=mlp)


def _mistral(reader: ConfigReader) -> ModelSpec:
    attention = _attention(reader, window=reader.get("sliding_window"))
    return _rotary_model(reader, attention=attention, mlp=_swiglu(reader))


def _qwen2(reader: ConfigReader) -> ModelSpec:
    attention = _attention(reader, qkv_bias=True, window=_qwen_window(reader))
    return _rotary_model(reader, attention=attention, mlp=_swiglu(reader))


def _qwen3(reader: ConfigReader) -> ModelSpec:
    bias = reader.get("attention_bias", False)
    attention = _attention(
        reader,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        head_width=reader.get("head_dim", 128),
        window=_qwen_window(reader),
    )
    return _rotary_model(reader, attention=attention, mlp=_swiglu(reader))


def _qwen3_moe(reader: ConfigReader) -> ModelSpec:
    reader.only("decoder_sparse_step", 1)
    reader.only("mlp_only_layers", [])
    moe = MoeSpec(
        num_experts=reader.get("num_experts", reader.get("num_local_experts", 128)),
        top_k=reader.get("num_experts_per_tok", 8),
        width=reader.get("moe_intermediate_size", 768),
        normalise_top_k=reader.get("norm_topk_prob", False),
        aux_loss=reader.get("router_aux_loss_coef", 0.001),
    )
    return _qwen3(reader).with_(moe=moe)


def _mixtral(reader: ConfigReader) -> ModelSpec:
    reader.only("router_jitter_noise", 0.0)
    moe = MoeSpec(
        num_experts=reader.get("num_local_experts", 8),
        top_k=reader.get("num_experts_per_tok", 2),
        width=reader.need("intermediate_size"),
        aux_loss=reader.get("router_aux_loss_coef", 0.001),
    )
    attention = _attention(reader, window=reader.get("sliding_window"))
    return _rotary_model(reader, attention=attention, mlp=_swiglu(reader), moe=moe, theta=1e6, eps=1e-5)


def _gpt2(reader: ConfigReader) -> ModelSpec:
    reader.only("scale_attn_by_inverse_layer_idx", False)
    reader.only("scale_attn_weights", True)
    reader.only("add_cross_attention", False)
    width, num_heads = reader.need("n_embd"), reader.need("n_head")
    dropout = reader.get("resid_pdrop", 0.1)
    reader.only("embd_pdrop", dropout)
    activation = reader.get("activation_function", "gelu_new")
    reader.only("activation_function", *_ACTIVATIONS)
    return ModelSpec.model_validate(
        {
            "family": _name(reader),
            "vocab_size": reader.get("vocab_size", 50257),
            "num_layers": reader.need("n_layer"),
            "width": width,
            "max_positions": reader.get("n_positions", 1024),
            "attention": {
                "num_heads": num_heads,
                "num_kv_heads": num_heads,
                "head_width": _head_width(width, num_heads, reader.where),
                "qkv_bias": True,
                "output_bias": True,
                "dropout": reader.get("attn_pdrop", 0.1),
            },
            "mlp": {
                "kind": _ACTIVATIONS[activation],
                "width": reader.get("n_inner", 4 * width),
                "bias": True,
            },
            "norm": "layer",
            "norm_eps": reader.get("layer_norm_epsilon", 1e-5),
            "positions": "learned",
            "tied_head": reader.get("tie_word_embeddings", True),
            "dropout": dropout,
            "init_std": reader.get("initializer_range", 0.02),
        }
    )


def _deepseek_v2(reader: ConfigReader) -> ModelSpec:
    reader.only("topk_method", "greedy", "group_limited_greedy")
    reader.only("scoring_func", "softmax")
    reader.only("norm_topk_prob", False)
    grouped = reader.get("topk_method") == "group_limited_greedy"
    moe = _deepseek_moe(reader).with_(
        normalise_top_k=False,
        routed_scale=reader.get("routed_scaling_factor", 1.0),
        num_groups=reader.get("n_group", 1) if grouped else 1,
        top_groups=reader.get("topk_group", 1) if grouped else 1,
        aux_loss=reader.get("aux_loss_alpha", 0.0),
    )
    reader.seen |= {"n_group", "topk_group"}
    return _deepseek(reader, moe)


def _deepseek_v3(reader: ConfigReader) -> ModelSpec:
    reader.only("topk_method", "noaux_tc")
    reader.only("scoring_func", "sigmoid")
    num_groups = reader.get("n_group", 8)
    moe = _deepseek_moe(reader).with_(
        score="sigmoid",
        normalise_top_k=reader.get("norm_topk_prob", True),
        routed_scale=reader.get("routed_scaling_factor", 2.5),
        num_groups=num_groups,
        top_groups=reader.get("topk_group", 4),
        # One group, as in Moonlight and Kimi K2, is not scored.
        group_score="top2_sum" if num_groups > 1 else "max",
        has_balance_bias=True,
        aux_loss=reader.get("aux_loss_alpha", 0.0),
    )
    return _deepseek(reader, moe)


def _deepseek_moe(reader: ConfigReader) -> MoeSpec:
    width = reader.need("moe_intermediate_size")
    return MoeSpec(
        num_experts=reader.need("n_routed_experts"),
        top_k=reader.need("num_experts_per_tok"),
        width=width,
        shared_width=width * reader.get("n_shared_experts", 0),
        first_dense_layers=reader.get("first_k_dense_replace", 0),
    )


def _deepseek(reader: ConfigReader, moe: MoeSpec) -> ModelSpec:
    reader.only("attention_bias", False)
    reader.only("mlp_bias", False)
    reader.only("rope_interleave", True)
    reader.only("moe_layer_freq", 1)
    reader.seen |= {"head_dim", "qk_head_dim"}  # derived from the widths below
    latent = LatentSpec(
        query_rank=reader.get("q_lora_rank"),
        kv_rank=reader.need("kv_lora_rank"),
        nope_width=reader.need("qk_nope_head_dim"),
        rope_width=reader.need("qk_rope_head_dim"),
        value_width=reader.need("v_head_dim"),
    )
    num_heads = reader.need("num_attention_heads")
    reader.only("num_key_value_heads", num_heads)
    attention = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_width=latent.nope_width + latent.rope_width,
        latent=latent,
        dropout=reader.get("attention_dropout", 0.0),
    )
    return _rotary_model(reader, attention=attention, mlp=_swiglu(reader), moe=moe)


# ---- shared by the families with rope ------------------------------------------------------------


def _rotary_model(
    reader: ConfigReader,
    *,
    attention: AttentionSpec,
    mlp: MlpSpec,
    moe: MoeSpec | None = None,
    theta: float = 10000.0,
    eps: float = 1e-6,
) -> ModelSpec:
    reader.seen |= _ROTARY_KEYS
    rope = read_rope(reader.config, where=reader.where, latent=attention.latent is not None, theta=theta)
    return ModelSpec(
        family=_name(reader),
        vocab_size=reader.need("vocab_size"),
        num_layers=reader.need("num_hidden_layers"),
        width=reader.need("hidden_size"),
        max_positions=reader.need("max_position_embeddings"),
        attention=attention,
        mlp=mlp,
        moe=moe,
        norm_eps=reader.get("rms_norm_eps", eps),
        rope=rope,
        tied_head=reader.get("tie_word_embeddings", False),
        init_std=reader.get("initializer_range", 0.02),
    )


def _attention(reader: ConfigReader, **rest: Any) -> AttentionSpec:
    num_heads = reader.need("num_attention_heads")
    head_width = reader.get("head_dim") or _head_width(reader.need("hidden_size"), num_heads, reader.where)
    fields: dict[str, Any] = {
        "num_heads": num_heads,
        "num_kv_heads": reader.get("num_key_value_heads", num_heads),
        "head_width": head_width,
        "dropout": reader.get("attention_dropout", 0.0),
        **rest,
    }
    return AttentionSpec.model_validate(fields)


def _head_width(width: int, num_heads: int, where: str) -> int:
    if width % num_heads:
        raise SpecError(
            f"{num_heads} heads do not divide the width {width}", where=where, hint="set head_dim"
        )
    return width // num_heads


def _swiglu(reader: ConfigReader, *, bias: bool = False) -> MlpSpec:
    reader.only("hidden_act", "silu")
    return MlpSpec(width=reader.need("intermediate_size"), bias=bias)


def _qwen_window(reader: ConfigReader) -> int | None:
    """The sliding window of a Qwen config, which has an effect only with `use_sliding_window`."""
    window = reader.get("sliding_window", 4096)
    layer_types = set(reader.get("layer_types", []))
    if layer_types:
        uniform = layer_types in ({"full_attention"}, {"sliding_attention"})
        windowed = layer_types == {"sliding_attention"}
    else:
        windowed = bool(reader.get("use_sliding_window", False))
        uniform = not windowed or reader.get("max_window_layers", 0) == 0
    reader.seen |= {"use_sliding_window", "max_window_layers"}
    if not uniform:
        fact = "some layers have a sliding window and some have not"
        raise SpecError(fact, where=reader.where, hint="only one window for all layers is supported")
    return window if windowed else None


def _name(reader: ConfigReader) -> str:
    name = str(reader.config.get("_name_or_path") or "").rstrip("/").rsplit("/", 1)[-1]
    return name or str(reader.config["model_type"])


_FROM: dict[str, Callable[[ConfigReader], ModelSpec]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "gpt2": _gpt2,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
}
