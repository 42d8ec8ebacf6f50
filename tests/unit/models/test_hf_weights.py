"""Our decoder computes what `transformers` computes, and weights survive both directions."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.support.hf_folder import load_folder
from tests.support.shrunk_families import shrunk_family
from torch import Tensor, nn

from meshwright.errors import CheckpointError
from meshwright.models import Decoder, build_decoder, initialise
from meshwright.models.hf_weights import HuggingFaceReader, save_folder
from meshwright.spec import ModelSpec
from meshwright.spec.huggingface import to_config

# float32 sums in another order over three narrow layers; logits are of the order of one.
SAME_FLOAT32 = {"rtol": 1e-5, "atol": 1e-5}
NUM_POSITIONS = 24

_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 2.0,
    "beta_slow": 0.5,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
    "rope_theta": 10000.0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 10000.0,
}
_MLA = {
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}
_V3 = {**_MLA, "q_lora_rank": 12, "n_group": 4, "topk_group": 2, "n_shared_experts": 1, "num_mtp_layers": 0}
_SMALL = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "attn_implementation": "eager",
}
_GPT2 = {
    "vocab_size": 67,
    "n_positions": 64,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "attn_implementation": "eager",
}

CASES = {
    "llama": ("Llama", {**_SMALL}),
    "llama3": ("Llama", {**_SMALL, "rope_parameters": _LLAMA3, "tie_word_embeddings": True}),
    "llama-biases": ("Llama", {**_SMALL, "attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    "qwen2": ("Qwen2", {**_SMALL}),
    "qwen3": ("Qwen3", {**_SMALL, "head_dim": 8}),
    "mistral-window": ("Mistral", {**_SMALL, "sliding_window": 5}),
    "mixtral": ("Mixtral", {**_SMALL, "num_local_experts": 8}),
    "qwen3-moe": (
        "Qwen3Moe",
        {**_SMALL, "head_dim": 8, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    ),
    "gpt2": ("GPT2", _GPT2),
    "deepseek-v3": ("DeepseekV3", {**_SMALL, **_V3}),
    "deepseek-v3-yarn": ("DeepseekV3", {**_SMALL, **_V3, "rope_parameters": _YARN}),
    "deepseek-v2": ("DeepseekV2", {**_SMALL, **_MLA, "q_lora_rank": None, "n_shared_experts": 2}),
    "deepseek-v2-yarn-groups": (
        "DeepseekV2",
        {
            **_SMALL,
            **_MLA,
            "n_shared_experts": 1,
            "q_lora_rank": 12,
            "rope_parameters": _YARN,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 16.0,
        },
    ),
}


def _transformers_model(case: str) -> nn.Module:
    name, settings = CASES[case]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**settings)
    suffix = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    model = getattr(transformers, name + suffix)(config).eval()
    with torch.no_grad():  # biases and norms start at 0 and 1, which would hide a mistake
        for tensor in [*model.parameters(), *_correction_biases(model)]:
            tensor.add_(torch.randn_like(tensor) * 0.1)
    return model


def _correction_biases(model: nn.Module) -> list[Tensor]:
    return [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]


def _tokens() -> Tensor:
    return torch.randint(67, (2, NUM_POSITIONS), generator=torch.Generator().manual_seed(1))


def _logits(model: Decoder) -> Tensor:
    tokens_BS = _tokens()
    positions_BS = torch.arange(NUM_POSITIONS).expand_as(tokens_BS)
    with torch.no_grad():
        return model.eval()(tokens_BS, positions_BS=positions_BS)


def _read(folder: Path) -> Decoder:
    reader = HuggingFaceReader(folder)
    model = build_decoder(reader.model)
    initialise(model, seed=5)
    load_folder(model, reader)
    return model


@pytest.mark.parametrize("case", CASES)
def test_forward_equals_transformers(case: str, tmp_path: Path) -> None:
    theirs = _transformers_model(case)
    theirs.save_pretrained(tmp_path)
    ours = _read(tmp_path)
    with torch.no_grad():
        expected = theirs(_tokens()).logits
    assert expected.abs().max() > 0.1  # an all-zero model would agree with anything
    torch.testing.assert_close(_logits(ours), expected, **SAME_FLOAT32)


@pytest.mark.parametrize("case", CASES)
def test_what_we_write_transformers_reads(case: str, tmp_path: Path) -> None:
    theirs = _transformers_model(case)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = _read(tmp_path / "theirs")
    save_folder(ours.state_dict(), ours.spec, tmp_path / "ours", max_shard_bytes=30_000)
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 1
    kind = getattr(transformers, CASES[case][0] + ("LMHeadModel" if case == "gpt2" else "ForCausalLM"))
    back, report = kind.from_pretrained(
        tmp_path / "ours", output_loading_info=True, attn_implementation="eager"
    )
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    with torch.no_grad():
        torch.testing.assert_close(back.eval()(_tokens()).logits, _logits(ours), **SAME_FLOAT32)


@pytest.mark.parametrize(
    "family", ["gpt2-124m", "llama-3.2-1b", "qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v3"]
)
def test_round_trip_is_bitwise(family: str, tmp_path: Path) -> None:
    ours = _initialised(shrunk_family(family))
    save_folder(ours.state_dict(), ours.spec, tmp_path / "out", max_shard_bytes=20_000)
    back = _read(tmp_path / "out")
    for name, tensor in ours.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name


def _initialised(spec: ModelSpec) -> Decoder:
    model = build_decoder(spec)
    initialise(model, seed=3)
    return model


def test_a_tied_head_is_written_once(tmp_path: Path) -> None:
    ours = _initialised(shrunk_family("llama-3.2-1b"))
    save_folder(ours.state_dict(), ours.spec, tmp_path / "out")
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")


@pytest.mark.parametrize("family", ["gpt2-124m", "llama-3.1-8b", "deepseek-v3"])
def test_slices_are_parts_of_the_full_tensor(family: str, tmp_path: Path) -> None:
    ours = _initialised(shrunk_family(family))
    save_folder(ours.state_dict(), ours.spec, tmp_path / "out")
    reader = HuggingFaceReader(tmp_path / "out")
    for name in reader.names():
        full = reader.read(name)
        index = (slice(2, 7), slice(1, 20), slice(3, None))[: full.ndim]
        assert torch.equal(reader.read_slice(name, index), full[index]), name


def test_a_stage_loads_only_its_part(tmp_path: Path) -> None:
    ours = _initialised(shrunk_family("qwen3-8b"))
    save_folder(ours.state_dict(), ours.spec, tmp_path / "out")
    stage = build_decoder(ours.spec, layers=range(1, 2), has_embedding=False, has_head=False)
    initialise(stage, seed=9)
    load_folder(stage, HuggingFaceReader(tmp_path / "out"))
    for name, tensor in stage.state_dict().items():
        assert torch.equal(tensor, ours.state_dict()[name])


def test_16_bit_weights_leave_the_balance_bias_in_fp32(tmp_path: Path) -> None:
    ours = _initialised(shrunk_family("deepseek-v3"))
    save_folder(ours.state_dict(), ours.spec, tmp_path / "out", dtype=torch.bfloat16)
    saved = load_file(tmp_path / "out" / "model.safetensors")
    dtypes = {name: tensor.dtype for name, tensor in saved.items()}
    biases = {name for name in dtypes if name.endswith("e_score_correction_bias")}
    assert {dtypes[name] for name in biases} == {torch.float32}
    assert {dtypes[name] for name in dtypes.keys() - biases} == {torch.bfloat16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_the_first_gpt2_files_are_read(tmp_path: Path) -> None:
    """They have no `transformer.` prefix and carry mask buffers."""
    ours = _initialised(shrunk_family("gpt2-124m"))
    save_folder(ours.state_dict(), ours.spec, tmp_path / "new")
    tensors = load_file(tmp_path / "new" / "model.safetensors")
    old = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    old["h.0.attn.bias"] = torch.ones(1, 1, 4, 4)
    (tmp_path / "old").mkdir()
    save_file(old, tmp_path / "old" / "model.safetensors")
    (tmp_path / "old" / "config.json").write_text(json.dumps(to_config(ours.spec)))
    torch.testing.assert_close(_logits(_read(tmp_path / "old")), _logits(ours), rtol=0, atol=0)


def _written(tmp_path: Path, **changes: Tensor | None) -> Path:
    """A small Llama folder with tensors replaced, or left out where None."""
    ours = _initialised(shrunk_family("llama-3.1-8b"))
    folder = tmp_path / "out"
    save_folder(ours.state_dict(), ours.spec, folder)
    with safe_open(folder / "model.safetensors", framework="pt") as handle:
        tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    tensors |= changes
    save_file({name: t for name, t in tensors.items() if t is not None}, folder / "model.safetensors")
    return folder


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    folder = _written(tmp_path, **{"model.norm.weight": None})
    with pytest.raises(CheckpointError, match=r"1 missing tensor: model\.norm\.weight") as caught:
        HuggingFaceReader(folder)
    assert caught.value.where == str(folder) and caught.value.hint


def test_unexpected_tensors_are_named(tmp_path: Path) -> None:
    folder = _written(tmp_path, **{"model.layers.0.self_attn.q_norm.weight": torch.ones(8)})
    with pytest.raises(CheckpointError, match=r"1 unexpected tensor: model\.layers\.0\.self_attn\.q_norm"):
        HuggingFaceReader(folder)


def test_quantised_weights_are_refused_with_a_hint(tmp_path: Path) -> None:
    folder = _written(tmp_path, **{"model.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(8)})
    with pytest.raises(CheckpointError) as caught:
        HuggingFaceReader(folder)
    assert "bf16" in caught.value.hint


def test_wrong_shapes_are_refused(tmp_path: Path) -> None:
    folder = _written(tmp_path, **{"model.norm.weight": torch.ones(7)})
    with pytest.raises(CheckpointError, match=r"has shape \(7,\), the model has \(32,\)"):
        HuggingFaceReader(folder)


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(to_config(shrunk_family("llama-2-7b"))))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError) as caught:
        HuggingFaceReader(tmp_path)
    assert "safetensors" in caught.value.hint


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    folder = _written(tmp_path)
    (folder / "model.safetensors").write_bytes(b"\x08" * 40)
    with pytest.raises(CheckpointError, match="damaged"):
        HuggingFaceReader(folder)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    ours = _initialised(shrunk_family("llama-2-7b"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("x")
    with pytest.raises(CheckpointError, match="not empty"):
        save_folder(ours.state_dict(), ours.spec, tmp_path / "out")


def test_an_incomplete_state_is_refused_before_writing(tmp_path: Path) -> None:
    ours = _initialised(shrunk_family("llama-2-7b"))
    state = dict(ours.state_dict())
    del state["head.weight"]
    with pytest.raises(CheckpointError, match=r"1 missing tensor: head\.weight"):
        save_folder(state, ours.spec, tmp_path / "out")
    assert not (tmp_path / "out").exists()
