"""The names that Hugging Face models give to our linears: `attention.query` is `q_proj`."""

from meshwright.spec.huggingface.write import model_type_of
from meshwright.spec.model import ModelSpec

ATTENTION = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
LATENT_ATTENTION = {
    "query": "q_proj",
    "query_down": "q_a_proj",
    "query_up": "q_b_proj",
    "kv_down": "kv_a_proj_with_mqa",
    "kv_up": "kv_b_proj",
    "output": "o_proj",
}
MLP = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
MIXTRAL_EXPERTS = {"gate": "w1", "up": "w3", "down": "w2"}
_GPT2_ATTENTION = {"query": "c_attn", "key": "c_attn", "value": "c_attn", "output": "c_proj"}
_GPT2_MLP = {"up": "c_fc", "down": "c_proj"}


def hf_projection(model: ModelSpec, weight: str) -> str:
    """The last part of a matrix's Hugging Face module name: `q_proj` of blocks.0.attention.query.weight."""
    parts = weight.removesuffix(".weight").split(".")
    is_attention, own = parts[2] == "attention", parts[-1]
    if model_type_of(model) == "gpt2":
        return (_GPT2_ATTENTION if is_attention else _GPT2_MLP).get(own, own)
    if is_attention:
        return (LATENT_ATTENTION if model.attention.latent else ATTENTION)[own]
    is_mixtral = parts[3] == "experts" and model_type_of(model) == "mixtral"
    return (MIXTRAL_EXPERTS if is_mixtral else MLP)[own]
