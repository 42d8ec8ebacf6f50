"""Weights of Megatron core's GPT under Hugging Face's names: RMSNorm, gated MLP, fused query, key and value.

Both forms of layers are known: a tensor for each (`decoder.layers.3.mlp.linear_fc2.weight`), and all layers
stacked in one (`decoder.layers.mlp.linear_fc2.weight`), as Megatron's distributed checkpoints have them. The
vocabulary may be padded. Files are of one tensor-parallel rank, or of a distributed checkpoint.
"""

import re
from collections.abc import Iterator, Mapping

from torch import Tensor

from meshwright.checkpoint.renamed_tensors import RenamedTensors
from meshwright.spec import ModelSpec

MEGATRON_EMBEDDING = "embedding.word_embeddings.weight"
_TOP = {
    "model.embed_tokens.weight": MEGATRON_EMBEDDING,
    "model.norm.weight": "decoder.final_layernorm.weight",
    "lm_head.weight": "output_layer.weight",
}
_QKV = {"q_proj": 0, "k_proj": 1, "v_proj": 2}
_PARTS: dict[str, tuple[str, ...]] = {
    "input_layernorm.weight": (
        "self_attention.linear_qkv.layer_norm_weight",
        "input_layernorm.weight",
    ),
    "post_attention_layernorm.weight": ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
    "self_attn.o_proj.weight": ("self_attention.linear_proj.weight",),
    "self_attn.q_norm.weight": ("self_attention.q_layernorm.weight",),
    "self_attn.k_norm.weight": ("self_attention.k_layernorm.weight",),
    "mlp.gate_proj.weight": ("mlp.linear_fc1.weight",),
    "mlp.up_proj.weight": ("mlp.linear_fc1.weight",),
    "mlp.down_proj.weight": ("mlp.linear_fc2.weight",),
    **{
        f"self_attn.{name}.{leaf}": (f"self_attention.linear_qkv.{leaf}",)
        for name in _QKV
        for leaf in ("weight", "bias")
    },
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


class MegatronTensors(RenamedTensors):
    """Tensors of Megatron core, under Hugging Face's names."""

    def __init__(self, tensors: Mapping[str, Tensor], prefix: str, model: ModelSpec) -> None:
        self._tensors, self._model = tensors, model
        place: dict[str, tuple[str, int | None]] = {}
        for name in _hugging_face_names(model):
            for on_disk, layer in _places(name):
                if prefix + on_disk in tensors:
                    place.setdefault(name, (prefix + on_disk, layer))
        super().__init__(place)

    def __getitem__(self, name: str) -> Tensor:
        on_disk, layer = self._place[name]
        tensor = self._tensors[on_disk]
        tensor = tensor if layer is None else tensor[layer]
        projection = name.split(".")[-2]  # `lm_head.weight` too
        if projection in _QKV:
            return self._unfused(tensor, _QKV[projection])
        if projection in ("gate_proj", "up_proj"):
            return tensor.chunk(2, dim=0)[projection == "up_proj"]
        if projection in ("embed_tokens", "lm_head"):
            return tensor[: self._model.vocab_size]
        return tensor

    def _unfused(self, fused: Tensor, part: int) -> Tensor:
        """Query, key or value of rows that are grouped: the queries of a group, its key, its value."""
        attention = self._model.attention
        groups = attention.num_kv_heads or attention.num_heads
        queries = attention.num_heads // groups
        rows = fused.view(groups, queries + 2, -1, *fused.shape[1:])
        found = rows[:, :queries] if part == 0 else rows[:, queries + part - 1]
        return found.reshape(-1, *fused.shape[1:])


def _hugging_face_names(model: ModelSpec) -> Iterator[str]:
    yield from _TOP
    for layer in range(model.num_layers):
        for part in _PARTS:
            yield f"model.layers.{layer}.{part}"


def _places(name: str) -> Iterator[tuple[str, int | None]]:
    """Where a tensor may be: (name on disk, layer of a stacked one)."""
    if name in _TOP:
        yield _TOP[name], None
        return
    found = _LAYER.fullmatch(name)
    assert found is not None
    layer, part = int(found[1]), found[2]
    for on_disk in _PARTS[part]:
        yield f"decoder.layers.{layer}.{on_disk}", None
        yield f"decoder.layers.{on_disk}", layer
