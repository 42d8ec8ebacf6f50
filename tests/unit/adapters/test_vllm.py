"""Our peft folders by the rules of vLLM's loader: what it would compute, or why it refuses them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tests.support.shrunk_families import TINY_FAMILIES, shrunk_family
from tests.support.vllm_folder import VllmRefuses, open_as_vllm
from torch import Tensor

from meshwright.adapters.merge import MergedTensors
from meshwright.adapters.peft_write import write_peft
from meshwright.adapters.vllm_rules import vllm_note, vllm_obstacles
from meshwright.spec import AdapterSpec, ModelSpec
from meshwright.spec.adapter import adapter_parameters
from meshwright.spec.huggingface.names import sources, state_shapes

LORA = AdapterSpec(rank=3, alpha=8)
ADAPTERS = {
    "lora": LORA,
    "rslora": LORA.with_(kind="rslora"),
    "ranks": LORA.with_(ranks=[{"pattern": "o_proj", "rank": 5, "alpha": 2}]),
}


def tensors_of(model: ModelSpec, adapter: AdapterSpec) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Random weights and adapters."""
    generator = torch.Generator().manual_seed(5)
    shapes = {one.name: one.shape for one in adapter_parameters(model, adapter)}
    state, adapters = (
        {name: torch.randn(shape, generator=generator) for name, shape in each.items()}
        for each in (state_shapes(model), shapes)
    )
    return state, adapters


def vllm_modules(model: ModelSpec) -> set[str]:
    """The modules of vLLM's model: linears by the last part of their name, and each routed expert."""
    found = set[str]()
    for source in sources(model).values():
        for name in source.names:
            module = name.removesuffix(".weight")
            _, marker, expert = module.partition(".experts.")
            found.add(f"experts.{expert}" if marker else module.rpartition(".")[2])
    return found - {"embed_tokens", "lm_head", "norm", "input_layernorm", "post_attention_layernorm", "gate"}


def write(folder: Path, model: ModelSpec, adapter: AdapterSpec) -> MergedTensors:
    state, adapters = tensors_of(model, adapter)
    merged = MergedTensors(state, adapters, model, adapter)
    write_peft(folder, model, adapter, adapters, base=None, merged=merged)
    return merged


def facts(folder: Path) -> tuple[dict, list[str]]:
    with safe_open(folder / "adapter_model.safetensors", framework="pt") as file:
        return json.loads((folder / "adapter_config.json").read_text()), list(file.keys())


@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize("family", [one for one in TINY_FAMILIES if not one.startswith(("gpt2", "megatron"))])
def test_vllm_adds_what_we_merge(tmp_path: Path, family: str, kind: str) -> None:
    model = shrunk_family(family)
    merged = write(tmp_path / "adapter", model, ADAPTERS[kind])
    assert vllm_note(*facts(tmp_path / "adapter")) is None
    found = open_as_vllm(tmp_path / "adapter", vllm_modules(model), is_packed_moe=model.moe is not None)
    on_disk = sources(model)
    for name in merged.matrices:
        change = merged[name] - merged.base[name]
        parts = change if merged.matrices[name].is_expert else [change]
        for hf_name, part in zip(on_disk[name].names, parts, strict=True):
            factors = found.pop(hf_name.removesuffix(".weight"))
            torch.testing.assert_close(factors.scaled_b @ factors.a, part, rtol=1e-4, atol=1e-4)
    assert not found


REFUSED = {
    "dora": ("llama-3.1-8b", LORA.with_(kind="dora"), "magnitudes"),
    "tokens": ("llama-3.1-8b", LORA.with_(tokens=(3, 5)), "rows of single tokens"),
    "one projection": (
        "qwen3-30b-a3b",
        LORA.with_(targets=("blocks.*.mlp.experts.down", "query")),
        "down_proj",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_vllm_refuses_is_printed(tmp_path: Path, case: str) -> None:
    family, adapter, reason = REFUSED[case]
    model = shrunk_family(family)
    write(tmp_path / "adapter", model, adapter)
    with pytest.raises(VllmRefuses):
        open_as_vllm(tmp_path / "adapter", vllm_modules(model), is_packed_moe=model.moe is not None)
    (obstacle,) = vllm_obstacles(*facts(tmp_path / "adapter"))
    assert reason in obstacle
    note = vllm_note(*facts(tmp_path / "adapter"))
    assert note is not None and "convert without --to peft" in note


def test_modules_trained_in_full_are_refused(tmp_path: Path) -> None:
    model = shrunk_family("llama-3.1-8b")
    state, adapters = tensors_of(model, LORA)
    adapters["norm.weight"] = state["norm.weight"] + 1
    merged = MergedTensors(state, adapters, model, LORA)
    write_peft(tmp_path / "adapter", model, LORA, adapters, base=None, merged=merged)
    with pytest.raises(VllmRefuses, match="modules_to_save"):
        open_as_vllm(tmp_path / "adapter", vllm_modules(model))
    assert "trained in full" in str(vllm_note(*facts(tmp_path / "adapter")))


def test_options_of_vllm(tmp_path: Path) -> None:
    """A rank above the default, and adapters on embedding and head."""
    model = shrunk_family("llama-3.1-8b")
    merged = write(tmp_path / "high", model, LORA.with_(rank=15, ranks=[{"pattern": "q_proj", "rank": 20}]))
    assert "--max-lora-rank 32" in str(vllm_note(*facts(tmp_path / "high")))
    with pytest.raises(VllmRefuses, match="greater than max_lora_rank 16"):
        open_as_vllm(tmp_path / "high", vllm_modules(model))
    assert len(open_as_vllm(tmp_path / "high", vllm_modules(model), max_rank=32)) == len(merged.matrices)
    write(tmp_path / "ends", model, LORA.with_(targets=("embedding", "head", "query")))
    assert "some families only" in str(vllm_note(*facts(tmp_path / "ends")))
    with pytest.raises(VllmRefuses, match="received"):
        open_as_vllm(tmp_path / "ends", vllm_modules(model))
    ends = open_as_vllm(tmp_path / "ends", vllm_modules(model) | {"embed_tokens", "lm_head"})
    assert ends["model.embed_tokens"].a.shape == (3, model.vocab_size)
