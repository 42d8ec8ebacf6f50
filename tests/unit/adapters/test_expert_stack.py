"""Routed experts that the real peft adapted as stacked parameters: read as they are, or refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.run_directories import attempt, last_checkpoint, read_tensors
from tests.support.runs import tiny_run
from tests.support.shrunk_families import shrunk_family
from tests.unit.adapters.test_peft import TOLERANCE, merged_logits, peft_model, rewritten

from meshwright.adapters.peft_config import CONFIG_FILE
from meshwright.adapters.peft_folder import PeftFolder
from meshwright.adapters.peft_read import PeftReader
from meshwright.errors import CheckpointError
from meshwright.spec import AdapterSpec, CheckpointSpec, ModelSpec, ParallelSpec, ScheduleSpec
from meshwright.spec.adapter import adapter_parameters

pytest.importorskip("peft")
pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")  # those of peft and transformers are not ours
GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
BOTH = {"target_modules": [], "target_parameters": [GATE_UP, DOWN]}
EXPERTS = AdapterSpec(rank=3, alpha=8, targets=("*.experts.*",))
ATTENTION = EXPERTS.with_(targets=("q_proj", "o_proj", "*.experts.*"))
NAMES = {
    "mixtral-8x7b": ["w1", "w2", "w3"],
    "qwen3-30b-a3b": ["gate_proj", "up_proj", "down_proj"],
    "deepseek-v2-lite": ["gate_proj", "up_proj", "down_proj"],
}
DOUBLED = EXPERTS.with_(ranks=[{"pattern": one, "rank": 6} for one in ("*.experts.gate", "*.experts.up")])
"""By the names of single experts peft gives gate and up together the sum of their ranks."""


def small(family: str, **changes: Any) -> ModelSpec:
    model = shrunk_family(family, num_layers=2)
    assert model.moe is not None
    return model.with_(moe=model.moe.with_(**({"num_experts": 4} | changes)))


CASES: dict[str, tuple[dict[str, Any], AdapterSpec]] = {
    "experts": (BOTH, EXPERTS),
    "and attention": (BOTH | {"target_modules": ["q_proj", "o_proj"]}, ATTENTION),
    "rslora": (BOTH | {"use_rslora": True}, EXPERTS.with_(kind="rslora")),
    "rslora there": (BOTH | {"use_rslora": True}, EXPERTS),
    "patterns": (
        BOTH | {"rank_pattern": {"experts.down_proj": 2}, "alpha_pattern": {"gate_up_proj": 5}},
        EXPERTS.with_(ranks=[{"pattern": "*.experts.down", "rank": 2}]),
    ),
    "down alone": (BOTH | {"target_parameters": [DOWN]}, EXPERTS.with_(targets=("*.experts.down",))),
    "gate and up alone": (
        BOTH | {"target_parameters": [GATE_UP]},
        EXPERTS.with_(targets=("*.experts.gate", "*.experts.up")),
    ),
    "one layer": (
        BOTH | {"target_parameters": [f"1.{GATE_UP}", f"1.{DOWN}"]},
        EXPERTS.with_(targets=("blocks.1.mlp.experts.*",)),
    ),
    "names of single experts": ({}, DOUBLED),
}
FAMILIES = {
    "mixtral-8x7b": list(CASES),
    "qwen3-30b-a3b": ["experts", "and attention", "rslora", "names of single experts"],
    "deepseek-v2-lite": ["experts", "names of single experts"],
}


PAIRS = [
    pytest.param(family, case, id=f"{family}-{case.replace(' ', '_')}")
    for family, cases in FAMILIES.items()
    for case in cases
]


@pytest.mark.parametrize(("family", "case"), PAIRS)
def test_logits_are_those_of_peft(tmp_path: Path, family: str, case: str) -> None:
    model, (settings, adapter) = small(family), CASES[case]
    theirs = peft_model(model, tmp_path, **(settings or {"target_modules": NAMES[family]}))
    tokens = torch.arange(16)[None] % model.vocab_size
    with torch.no_grad(), theirs.disable_adapter():
        without = theirs(tokens).logits
    with torch.no_grad():
        expected = theirs(tokens).logits
    ours = merged_logits(model, adapter, tmp_path, tokens)
    assert (ours - expected).abs().max() < TOLERANCE * expected.abs().max()
    assert (ours - without).abs().max() > 1e-3


def read_whole(reader: PeftReader, model: ModelSpec, adapter: AdapterSpec) -> dict[str, torch.Tensor]:
    return {
        one.name: reader.read_slice(one.name, tuple(slice(0, size) for size in one.shape))
        for one in adapter_parameters(model, adapter)
    }


def test_a_rank_reads_its_slices(tmp_path: Path) -> None:
    model = small("qwen3-30b-a3b")
    peft_model(model, tmp_path, **BOTH)
    reader = PeftReader(tmp_path / "adapter", model, EXPERTS)
    index = (
        slice(1, 3),
        slice(1, 24),
        slice(1, 3),
    )  # experts; the last dim of B and the first of A are ranks
    for name, whole in read_whole(reader, model, EXPERTS).items():
        cut = index if name.endswith("lora_B") else (index[0], index[2], index[1])
        torch.testing.assert_close(reader.read_slice(name, cut), whole[cut], rtol=0, atol=0)
        empty = (slice(2, 2), *cut[1:])
        assert reader.read_slice(name, empty).shape == whole[empty].shape


def test_padded_ranks_are_those_of_lower_ones(tmp_path: Path) -> None:
    """All experts of a rank are next to each other in B."""
    model = small("mixtral-8x7b")
    peft_model(model, tmp_path, **BOTH)
    used = torch.arange(3 * 4) < 2 * 4
    rewritten(
        tmp_path / "adapter", lambda key, value: {key: value.where(used, 0) if "lora_B" in key else value}
    )
    lower = EXPERTS.with_(rank=2, alpha=EXPERTS.alpha * 2 / 3)
    whole = read_whole(PeftReader(tmp_path / "adapter", model, EXPERTS), model, EXPERTS)
    for name, found in read_whole(PeftReader(tmp_path / "adapter", model, lower), model, lower).items():
        expected = whole[name][..., :2] if name.endswith("lora_B") else whole[name][:, :2]
        torch.testing.assert_close(found, expected)
        assert whole[name].count_nonzero() >= expected.numel()


REFUSED: dict[str, tuple[dict[str, Any], AdapterSpec, str, str]] = {
    "another rank": (BOTH, EXPERTS.with_(rank=4), "has shape 12 x 32, and 16 x 32 in this run", "has rank 3"),
    "the sum of ranks": (
        {"target_modules": NAMES["mixtral-8x7b"]},
        EXPERTS,
        "has shape 24 x 32, and 12 x 32 in this run",
        "the experts' gate_up_proj has rank 6 there",
    ),
    "gate without up": (BOTH, EXPERTS.with_(targets=("w1", "w2")), "adapts gate alone", "name both"),
    "no down": (
        BOTH | {"target_parameters": [GATE_UP]},
        EXPERTS,
        "has no base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.weight",
        "gate_up_proj is gate and up",
    ),
    "down for gate and up": (
        BOTH | {"target_parameters": [DOWN]},
        EXPERTS.with_(targets=("w1", "w3")),
        "has shape 12 x 40, and 12 x 32 in this run",
        "gate_up_proj is gate and up",
    ),
    "also down": (
        BOTH,
        EXPERTS.with_(targets=("w1", "w3")),
        "has also base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.weight",
        "gate_up_proj is gate and up",
    ),
    "no attention": (BOTH, ATTENTION, "has no base_model.model.model.layers.0.self_attn", "adapter.targets"),
    "a router": (
        {"target_modules": "all-linear"},
        DOUBLED.with_(targets=("all-linear",)),
        "has also base_model.model.model.layers.0.mlp.gate.lora_A.weight",
        "routers have no adapters here",
    ),
}


def refusal(folder: Path, model: ModelSpec, adapter: AdapterSpec) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        PeftFolder(folder, model, adapter)
    assert caught.value.where == str(folder)
    return caught.value


@pytest.mark.parametrize("case", REFUSED)
def test_other_adapters_are_refused(tmp_path: Path, case: str) -> None:
    settings, adapter, fact, hint = REFUSED[case]
    model = small("mixtral-8x7b")
    peft_model(model, tmp_path, **settings)
    error = refusal(tmp_path / "adapter", model, adapter)
    assert fact in error.fact
    assert hint in error.hint


def test_another_number_of_experts_is_refused(tmp_path: Path) -> None:
    peft_model(small("mixtral-8x7b"), tmp_path, **BOTH)
    error = refusal(tmp_path / "adapter", small("mixtral-8x7b", num_experts=8), EXPERTS)
    assert "has shape 12 x 32, and 24 x 32 in this run" in error.fact


def test_the_layout_of_an_earlier_peft_is_refused(tmp_path: Path) -> None:
    """Before 0.19.1 peft took every stacked parameter for one whose inputs come first."""
    model = small("mixtral-8x7b")
    peft_model(model, tmp_path, **BOTH)
    letters = {"lora_A": "lora_B", "lora_B": "lora_A"}
    rewritten(
        tmp_path / "adapter",
        lambda key, value: {re.sub("lora_[AB]", lambda one: letters[one[0]], key): value.mT.contiguous()},
    )
    error = refusal(tmp_path / "adapter", model, EXPERTS)
    assert "has shape 12 x 80, and 12 x 32 in this run" in error.fact
    assert "peft before 0.19.1" in error.hint


@pytest.mark.parametrize("version", ["0.18.0", None])
def test_a_square_parameter_needs_the_version_of_its_layout(tmp_path: Path, version: str | None) -> None:
    model, down = small("qwen3-30b-a3b", width=32), EXPERTS.with_(targets=("down",))
    peft_model(model, tmp_path, **(BOTH | {"target_parameters": [DOWN]}))
    PeftFolder(tmp_path / "adapter", model, down)
    path = tmp_path / "adapter" / CONFIG_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | {"peft_version": version}))
    assert "as many inputs as outputs" in refusal(tmp_path / "adapter", model, down).fact


def test_training_from_the_folder_is_the_same_on_any_mesh(ranks: Any, tmp_path: Path) -> None:
    model = tiny_run("moe").model
    run = tiny_run(model.with_(mlp=model.mlp.with_(width=12)))  # the width of the experts, as in Mixtral
    peft_model(run.model, tmp_path, **(BOTH | {"target_modules": ["q_proj", "o_proj"]}))
    run = run.with_(
        adapter=ATTENTION.with_(start_from=str(tmp_path / "adapter")),
        checkpoint=CheckpointSpec(every_steps=2, start_from=str(tmp_path / "base")),
        schedule=ScheduleSpec(num_steps=2),
    )
    attempt(ranks, run, tmp_path / "one")
    expected = read_tensors(last_checkpoint(tmp_path / "one"))
    meshes = {"ep": ParallelSpec(dp_shard=2, zero=1, ep=2), "etp": ParallelSpec(tp=2, etp=2)}
    for name, parallel in meshes.items():
        attempt(ranks, run.with_(parallel=parallel), tmp_path / name)
        found = read_tensors(last_checkpoint(tmp_path / name))
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            torch.testing.assert_close(found[key], tensor, rtol=1e-9, atol=1e-10)
