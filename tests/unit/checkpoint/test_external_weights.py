"""Weights of other programs: torch files and DCP folders, with names of Hugging Face and torchtitan."""

import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.support.runs import MODELS
from torch import Tensor

from meshwright.checkpoint.convert import convert_weights
from meshwright.checkpoint.dcp_folder import DCP_METADATA, DcpTensors
from meshwright.checkpoint.weights import open_weights
from meshwright.errors import CheckpointError
from meshwright.spec.huggingface.names import sources, state_shapes

MODEL = MODELS["gqa"]
TITAN = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.layers": "layers",
}


def our_weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in state_shapes(MODEL).items()}


def hugging_face(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {source.names[0]: weights[name] for name, source in sources(MODEL).items()}


def in_pairs(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of a head as rotary embeddings of neighbouring pairs need them."""
    rows, width = weight.shape
    return weight.view(num_heads, 2, rows // num_heads // 2, width).transpose(1, 2).reshape(rows, width)


def titan(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {}
    for name, tensor in hugging_face(weights).items():
        heads = {"q_proj": MODEL.attention.num_heads, "k_proj": MODEL.attention.num_kv_heads}
        count = next((number for part, number in heads.items() if f"{part}.weight" in name), None)
        for theirs, ours in TITAN.items():
            name = name.replace(theirs, ours)
        found[name] = tensor if count is None else in_pairs(tensor, count)
    return found


def megatron(weights: dict[str, Tensor], *, stacked: bool = False) -> dict[str, Tensor]:
    """Fused query, key and value by group, fused gate and up, a padded vocabulary."""
    theirs = hugging_face(weights)
    groups = MODEL.attention.num_kv_heads or MODEL.attention.num_heads
    layers = []
    for layer in range(MODEL.num_layers):
        part = {
            name.removeprefix(f"model.layers.{layer}."): tensor
            for name, tensor in theirs.items()
            if name.startswith(f"model.layers.{layer}.")
        }
        q, k, v = (part.pop(f"self_attn.{name}_proj.weight") for name in "qkv")
        rows = [one.view(groups, -1, one.shape[1]) for one in (q, k, v)]
        layers.append(
            {
                "self_attention.linear_qkv.weight": torch.cat(rows, dim=1).reshape(-1, q.shape[1]),
                "self_attention.linear_qkv.layer_norm_weight": part.pop("input_layernorm.weight"),
                "self_attention.linear_proj.weight": part.pop("self_attn.o_proj.weight"),
                "mlp.linear_fc1.layer_norm_weight": part.pop("post_attention_layernorm.weight"),
                "mlp.linear_fc1.weight": torch.cat(
                    [part.pop("mlp.gate_proj.weight"), part.pop("mlp.up_proj.weight")]
                ),
                "mlp.linear_fc2.weight": part.pop("mlp.down_proj.weight"),
            }
        )
        assert not part
    top = {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "output_layer.weight": "lm_head.weight",
    }
    found = {
        name: torch.cat([theirs[hf], torch.zeros(7, theirs[hf].shape[1])])
        for name, hf in top.items()
        if hf in theirs
    }
    found["decoder.final_layernorm.weight"] = theirs["model.norm.weight"]
    if stacked:
        return found | {f"decoder.layers.{n}": torch.stack([one[n] for one in layers]) for n in layers[0]}
    return found | {f"decoder.layers.{i}.{n}": t for i, one in enumerate(layers) for n, t in one.items()}


NAMES = {
    "ours": dict,
    "hugging_face": hugging_face,
    "titan": titan,
    "megatron": megatron,
    "megatron_stacked": lambda weights: megatron(weights, stacked=True),
}


@pytest.mark.parametrize("kind", NAMES)
def test_a_torch_file(tmp_path: Path, kind: str) -> None:
    weights = our_weights()
    torch.save({"state_dict": NAMES[kind](weights)}, tmp_path / "a.pt")
    opened = open_weights(tmp_path / "a.pt", model=MODEL)
    assert set(opened.tensors) == set(weights)
    assert all(torch.equal(opened.tensors[name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize("kind", ("ours", "titan", "megatron_stacked"))
@pytest.mark.filterwarnings("ignore")  # of DCP, which has no process group here
def test_a_dcp_folder(tmp_path: Path, kind: str) -> None:
    weights = our_weights()
    state = {**NAMES[kind](weights), "optimizer.state.a": torch.zeros(3), "train_state": {"step": 7}}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    opened = open_weights(tmp_path / "dcp", model=MODEL)
    assert all(torch.equal(opened.tensors[name], tensor) for name, tensor in weights.items())
    convert_weights(opened, tmp_path / "folder", "huggingface")
    again = open_weights(tmp_path / "folder")
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in weights.items())
    with pytest.raises(CheckpointError, match="does not record its model"):
        open_weights(tmp_path / "dcp")


@pytest.mark.filterwarnings("ignore")
def test_a_shard_that_is_missing_is_one_error(tmp_path: Path) -> None:
    dcp.save(our_weights(), checkpoint_id=tmp_path, no_dist=True)
    for path in tmp_path.glob("*.distcp"):
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="cannot be read"):
        open_weights(tmp_path, model=MODEL)


class Touch:
    """A pickle that makes a file when it is opened by a plain unpickler."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self._path,)


@pytest.mark.parametrize("text", ("touch", "eval", "noise"))
def test_a_list_of_tensors_runs_no_code(tmp_path: Path, text: str) -> None:
    mark = tmp_path / "mark"
    content = {
        "touch": pickle.dumps(Touch(mark)),
        "eval": f"c__builtin__\neval\n(S'open({str(mark)!r}, \"w\")'\ntR.".encode(),
        "noise": b"\x80\x04\x95noise",
    }[text]
    (tmp_path / DCP_METADATA).write_bytes(content)
    with pytest.raises(CheckpointError, match="cannot be read"):
        DcpTensors(tmp_path)
    assert not mark.exists()


def test_a_tensor_without_a_place_is_refused(tmp_path: Path) -> None:
    extra = {"model.layers.0.self_attn.q_proj.surprise": torch.zeros(3)}
    torch.save({**hugging_face(our_weights()), **extra}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"1 tensor\(s\) have no place in the model"):
        open_weights(tmp_path / "a.pt", model=MODEL)
