"""Experts under the names of Hugging Face and torchtitan: Mixtral, Qwen3-MoE and DeepSeek."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.support.runs import MODELS
from torch import Tensor

from meshwright.checkpoint.weights import open_weights
from meshwright.errors import CheckpointError
from meshwright.spec import ModelSpec
from meshwright.spec.huggingface.names import sources, state_shapes

MIXTRAL = MODELS["moe"]
QWEN3 = MIXTRAL.with_(attention=MIXTRAL.attention.with_(qk_norm=True))
DEEPSEEK = MODELS["moe_shared"].with_(attention=MODELS["mla"].attention, tied_head=False)
FAMILIES = {"mixtral": MIXTRAL, "qwen3_moe": QWEN3, "deepseek": DEEPSEEK}
TITAN = {
    "model.embed_tokens": "tok_embeddings",
    "lm_head": "output",
    "model.": "",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "self_attn.q_a_proj": "attention.wq_a",
    "self_attn.q_a_layernorm": "attention.q_norm",
    "self_attn.q_b_proj": "attention.wq_b",
    "self_attn.kv_a_proj_with_mqa": "attention.wkv_a",
    "self_attn.kv_a_layernorm": "attention.kv_norm",
    "self_attn.kv_b_proj": "attention.wkv_b",
    "mlp.gate.e_score_correction_bias": "moe.expert_bias",
    "mlp.gate.": "moe.router.gate.",
    "mlp.shared_experts.gate_proj": "moe.shared_experts.w1",
    "mlp.shared_experts.up_proj": "moe.shared_experts.w3",
    "mlp.shared_experts.down_proj": "moe.shared_experts.w2",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}
EXPERT = re.compile(r"model\.(layers\.\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")


def our_weights(model: ModelSpec) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in state_shapes(model).items()}


def hugging_face(model: ModelSpec, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {}
    for name, source in sources(model).items():
        parts = weights[name] if source.stacked else [weights[name]]
        found |= {each: part.clone() for each, part in zip(source.names, parts, strict=True)}
    return found


def titan(model: ModelSpec, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """One stacked tensor for each projection of the experts of a layer."""
    found: dict[str, Tensor] = {}
    stacks: dict[str, list[Tensor]] = {}
    for name, tensor in hugging_face(model, weights).items():
        expert = EXPERT.fullmatch(name)
        if expert:
            projection = {"gate": "w1", "up": "w3", "down": "w2"}[expert[3]]
            stacks.setdefault(f"{expert[1]}.moe.experts.{projection}", []).append(tensor)
            continue
        for theirs, ours in TITAN.items():
            name = name.replace(theirs, ours)
        found[name] = tensor
    return found | {name: torch.stack(parts) for name, parts in stacks.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_names_of_hugging_face(tmp_path: Path, family: str) -> None:
    model = FAMILIES[family]
    weights = our_weights(model)
    torch.save(hugging_face(model, weights), tmp_path / "a.pt")
    opened = open_weights(tmp_path / "a.pt", model=model)
    assert set(opened.tensors) == set(weights)
    assert all(torch.equal(opened.tensors[name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize("family", ("qwen3_moe", "deepseek"))
@pytest.mark.filterwarnings("ignore")  # of DCP, which has no process group here
def test_a_dcp_folder_of_torchtitan(tmp_path: Path, family: str) -> None:
    model = FAMILIES[family]
    weights = our_weights(model)
    state = titan(model, weights)
    assert f"layers.{model.num_layers - 1}.moe.experts.w2" in state
    state |= {"layers.1.moe.tokens_per_expert": torch.zeros(4), "optimizer.state.a": torch.zeros(3)}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    opened = open_weights(tmp_path, model=model)
    assert all(torch.equal(opened.tensors[name], tensor) for name, tensor in weights.items())


def test_a_balance_bias_that_the_model_lacks_is_refused(tmp_path: Path) -> None:
    state = titan(QWEN3, our_weights(QWEN3)) | {"layers.0.moe.expert_bias": torch.ones(4)}
    torch.save(state, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"no place in the model, first layers\.0\.moe\.expert_bias"):
        open_weights(tmp_path / "a.pt", model=QWEN3)
