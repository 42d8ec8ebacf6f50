"""Names and layouts of our tensors in a Hugging Face checkpoint."""

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.spec import ModelSpec
from meshwright.spec.huggingface import projections
from meshwright.spec.huggingface.write import model_type_of
from meshwright.spec.parameters import parameters


@dataclass(frozen=True)
class Source:
    """The tensors on disk that one of ours consists of."""

    names: tuple[str, ...]
    """One name; or one per expert when `stacked`."""
    stacked: bool = False
    """Ours is the stack of these along a new first dim."""
    transposed: bool = False
    """On disk the shape is [in, out] instead of [out, in]: GPT-2."""
    third: int | None = None
    """Ours is this third of the output dim: GPT-2's fused query, key and value."""


def sources(model: ModelSpec) -> dict[str, Source]:
    """Sources of every parameter and saved buffer of the decoder, by our name and in our order."""
    translate = _gpt2 if model_type_of(model) == "gpt2" else _rotary
    return {name: translate(model, name) for name in state_names(model)}


def state_names(model: ModelSpec) -> Iterator[str]:
    """Names of the parameters, and after each router its balance bias where it has one."""
    has_bias = model.moe is not None and model.moe.has_balance_bias
    for parameter in parameters(model):
        yield parameter.name
        if parameter.kind == "router" and has_bias:
            yield parameter.name.removesuffix("weight") + "balance_bias"


def state_shapes(model: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Full shapes of all tensors in `state_names`."""
    shapes = {parameter.name: parameter.shape for parameter in parameters(model)}
    num_experts = model.moe.num_experts if model.moe else 0
    return {name: shapes.get(name, (num_experts,)) for name in state_names(model)}


_ROTARY_TOP = {
    "embedding.tokens.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_ATTENTION = {**projections.ATTENTION, "query_norm": "q_norm", "key_norm": "k_norm"}
_LATENT = {**projections.LATENT_ATTENTION, "query_norm": "q_a_layernorm", "kv_norm": "kv_a_layernorm"}


def _rotary(model: ModelSpec, name: str) -> Source:
    if name in _ROTARY_TOP:
        return Source((_ROTARY_TOP[name],))
    _, layer, part, *rest = name.split(".")
    prefix = f"model.layers.{layer}"
    if part == "attention_norm":
        return Source((f"{prefix}.input_layernorm.weight",))
    if part == "mlp_norm":
        return Source((f"{prefix}.post_attention_layernorm.weight",))
    if part == "attention":
        projections = _LATENT if model.attention.latent else _ATTENTION
        return Source((f"{prefix}.self_attn.{projections[rest[0]]}.{rest[1]}",))
    return _rotary_mlp(model, prefix, rest)


def _rotary_mlp(model: ModelSpec, prefix: str, rest: list[str]) -> Source:
    is_mixtral = model_type_of(model) == "mixtral"
    inner = "block_sparse_moe" if is_mixtral else "mlp"
    if rest[0] == "router":
        leaf = "e_score_correction_bias" if rest[1] == "balance_bias" else "weight"
        return Source((f"{prefix}.{inner}.gate.{leaf}",))
    if rest[0] == "experts":
        projection = (projections.MIXTRAL_EXPERTS if is_mixtral else projections.MLP)[rest[1]]
        num_experts = model.moe.num_experts if model.moe else 0
        names = (f"{prefix}.{inner}.experts.{e}.{projection}.weight" for e in range(num_experts))
        return Source(tuple(names), stacked=True)
    if rest[0] == "shared":
        return Source((f"{prefix}.mlp.shared_experts.{projections.MLP[rest[1]]}.{rest[2]}",))
    return Source((f"{prefix}.mlp.{projections.MLP[rest[0]]}.{rest[1]}",))


_GPT2_TOP = {
    "embedding.tokens.weight": "transformer.wte.weight",
    "embedding.positions.weight": "transformer.wpe.weight",
    "norm.weight": "transformer.ln_f.weight",
    "norm.bias": "transformer.ln_f.bias",
    "head.weight": "lm_head.weight",
}
_GPT2_PART = {
    "attention_norm": "ln_1",
    "mlp_norm": "ln_2",
    "attention.output": "attn.c_proj",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
_GPT2_THIRDS = {"attention.query": 0, "attention.key": 1, "attention.value": 2}


def _gpt2(model: ModelSpec, name: str) -> Source:
    del model
    if name in _GPT2_TOP:
        return Source((_GPT2_TOP[name],))
    _, layer, *middle, leaf = name.split(".")
    part = ".".join(middle)
    is_matrix = leaf == "weight" and len(middle) > 1
    third = _GPT2_THIRDS.get(part)
    hf_name = "attn.c_attn" if third is not None else _GPT2_PART[part]
    return Source((f"transformer.h.{layer}.{hf_name}.{leaf}",), transposed=is_matrix, third=third)
