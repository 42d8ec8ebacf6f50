"""Weights of torchtitan's Llama, Qwen3 and DeepSeek, dense and with experts, under Hugging Face's names.

torchtitan's Llama (also Meta's own release) rotates neighbouring pairs of a head; Hugging Face and we rotate
its two halves. So the rows of its query and key projections are put into the order of halves. torchtitan's
Qwen3, which normalises queries and keys, and its DeepSeek have the order of Hugging Face. The experts of a
layer are one stacked tensor.
"""

import re
from collections.abc import Iterator, Mapping

from torch import Tensor

from meshwright.checkpoint.renamed_tensors import RenamedTensors
from meshwright.spec import ModelSpec

TITAN_EMBEDDING = "tok_embeddings.weight"
_TOP = {
    TITAN_EMBEDDING: "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.k_norm": "self_attn.k_norm",
    "attention.wq_a": "self_attn.q_a_proj",
    "attention.wq_b": "self_attn.q_b_proj",
    "attention.wkv_a": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.wkv_b": "self_attn.kv_b_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
    "moe.router.gate": "mlp.gate",
    "moe.shared_experts.w1": "mlp.shared_experts.gate_proj",
    "moe.shared_experts.w3": "mlp.shared_experts.up_proj",
    "moe.shared_experts.w2": "mlp.shared_experts.down_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_EXPERTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_NAME = re.compile(r"layers\.(\d+)\.(.+)\.(weight|bias)")
_EXPERTS_NAME = re.compile(r"layers\.(\d+)\.moe\.experts\.(w[123])")
_BIAS_NAME = re.compile(r"layers\.(\d+)\.moe\.expert_bias")


class TitanTensors(RenamedTensors):
    """Tensors of torchtitan, under Hugging Face's names."""

    def __init__(self, tensors: Mapping[str, Tensor], prefix: str, model: ModelSpec) -> None:
        self._tensors, self._model = tensors, model
        super().__init__(
            {
                theirs: (name, expert)
                for name in tensors
                for theirs, expert in _hugging_face_names(name.removeprefix(prefix), model)
            }
        )
        """Name on disk and, where it is stacked, the expert, by Hugging Face's name."""
        attention = model.attention
        self._is_in_pairs = (
            attention.latent is None and f"{prefix}layers.0.attention.q_norm.weight" not in tensors
        )
        self._last: tuple[str, Tensor] | None = None
        """The last stacked tensor, which is read for each of its experts."""

    def __getitem__(self, name: str) -> Tensor:
        on_disk, expert = self._place[name]
        if expert is not None:
            return self._stacked(on_disk)[expert]
        tensor, attention = self._tensors[on_disk], self._model.attention
        if self._is_in_pairs and name.endswith("q_proj.weight"):
            return _halves(tensor, attention.num_heads)
        if self._is_in_pairs and name.endswith("k_proj.weight"):
            return _halves(tensor, attention.num_kv_heads or attention.num_heads)
        return tensor

    def _stacked(self, on_disk: str) -> Tensor:
        if self._last is None or self._last[0] != on_disk:
            self._last = (on_disk, self._tensors[on_disk])
        return self._last[1]


def _hugging_face_names(name: str, model: ModelSpec) -> Iterator[tuple[str, int | None]]:
    """Names of Hugging Face that are read from a tensor; each with its expert where that is stacked."""
    if name in _TOP:
        yield _TOP[name], None
    elif found := _EXPERTS_NAME.fullmatch(name):
        for expert in range(model.moe.num_experts if model.moe else 0):
            yield f"model.layers.{found[1]}.mlp.experts.{expert}.{_EXPERTS[found[2]]}.weight", expert
    elif (found := _BIAS_NAME.fullmatch(name)) and model.moe and model.moe.has_balance_bias:
        yield f"model.layers.{found[1]}.mlp.gate.e_score_correction_bias", None
    elif found := _NAME.fullmatch(name):
        part = _layer_part(found[2], model)
        if part is not None:
            yield f"model.layers.{found[1]}.{part}.{found[3]}", None


def _layer_part(part: str, model: ModelSpec) -> str | None:
    if part == "attention.q_norm":  # of the low-rank queries in DeepSeek, of each head in Qwen3
        return "self_attn.q_a_layernorm" if model.attention.latent else "self_attn.q_norm"
    return _LAYER.get(part)


def _halves(weight_OD: Tensor, num_heads: int) -> Tensor:
    """Rows of each head from the order of pairs (0, 1, 2, 3 ...) to that of halves (0, 2 ..., 1, 3 ...)."""
    rows, width = weight_OD.shape
    return weight_OD.view(num_heads, rows // num_heads // 2, 2, width).transpose(1, 2).reshape(rows, width)
