"""Initial weights: equal to the source on every mesh, and no rank reads more than its part."""

import contextlib
import io
import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.support.shrunk_families import shrunk_family
from torch.distributed.tensor import DTensor

from meshwright.checkpoint.adapters import base_digest
from meshwright.checkpoint.initial import load_initial_weights
from meshwright.checkpoint.save import save_checkpoint
from meshwright.errors import CheckpointError, MeshwrightError
from meshwright.mesh import World, build_mesh
from meshwright.models.decoder import build_decoder
from meshwright.models.hf_weights import HuggingFaceReader, save_folder
from meshwright.models.initialise import initialise
from meshwright.spec import ModelSpec, RunSpec
from meshwright.train.build import build_training

# The model's widths are chosen uneven so that shards of rows are uneven too.
MODEL = shrunk_family("llama-3.1-8b", vocab_size=70)
MESHES = {
    "one": {},
    "zero0": {"dp_replicate": 2},
    "zero1": {"dp_shard": 2, "zero": 1},
    "zero2 uneven": {"dp_shard": 3, "zero": 2},
    "zero3": {"dp_shard": 2, "zero": 3},
    "hybrid zero3": {"dp_replicate": 2, "dp_shard": 2, "zero": 3},
    "tp": {"tp": 2},
    "tp zero1": {"tp": 2, "dp_shard": 2, "zero": 1},
    "tp zero3": {"tp": 2, "dp_shard": 2, "zero": 3},
    "pp": {"pp": 2},
}


def run_of(model: ModelSpec, start_from: Path | str, **parallel: int) -> RunSpec:
    return RunSpec.model_validate(
        {
            "seed": 1,
            "device": "cpu",
            "model": model.model_dump(),
            "parallel": parallel,
            "optim": {"ema_decay": 0.9},
            "schedule": {"num_steps": 4},
            "data": {"synthetic": {}, "sequence_length": 8, "batch_sequences": 24},
            "checkpoint": {"start_from": str(start_from)},
        }
    )


def whole_weights(model: ModelSpec, seed: int = 7) -> dict[str, torch.Tensor]:
    decoder = build_decoder(model)
    initialise(decoder, seed)
    return {name: tensor.detach() for name, tensor in decoder.state_dict().items()}


def here() -> World:
    rank = dist.get_rank()
    return World(rank=rank, local_rank=rank, num_ranks=dist.get_world_size(), device=torch.device("cpu"))


def load_and_compare(run: RunSpec) -> dict[str, int]:
    """On every rank: load, compare with the whole weights, and count what was read."""
    bytes_read = 0
    original = HuggingFaceReader.read_slice

    def counting(self: HuggingFaceReader, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        nonlocal bytes_read
        part = original(self, name, index)
        bytes_read += part.nbytes
        return part

    HuggingFaceReader.read_slice = counting
    try:
        training = build_training(run, build_mesh(run.parallel, here()))
        load_initial_weights(run, training)
    finally:
        HuggingFaceReader.read_slice = original
    expected = whole_weights(run.model)
    for one in training.program.shards:
        assert torch.equal(one.as_global(one.shard).full_tensor(), expected[one.name]), one.name
        computing = one.parameter
        whole = computing.full_tensor() if isinstance(computing, DTensor) else computing
        assert torch.equal(whole.detach(), expected[one.name]), f"{one.name} as the model computes"
        assert training.ema is not None
        assert torch.equal(training.ema.averages[one.name], one.shard.detach()), f"average of {one.name}"
    held = sum(one.shard.nbytes for one in training.program.shards)
    return {"read": bytes_read, "held": held, "whole": sum(tensor.nbytes for tensor in expected.values())}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "hf"
    save_folder(whole_weights(MODEL), MODEL, path, max_shard_bytes=20_000)
    return path


@pytest.mark.parametrize("name", MESHES)
def test_hugging_face_folder_on_every_mesh(ranks, folder: Path, name: str):
    run = run_of(MODEL, folder, **MESHES[name])
    counts = ranks.run(load_and_compare, run.parallel.num_ranks, run)
    assert all(count["read"] == count["held"] for count in counts), "a rank read what it does not own"


def test_sharded_ranks_read_a_part_of_the_model(ranks, folder: Path):
    counts = ranks.run(load_and_compare, 4, run_of(MODEL, folder, dp_shard=4, zero=3))
    assert sum(count["read"] for count in counts) == counts[0]["whole"]
    # Uneven rows and vectors shared by all ranks: a little above a quarter.
    assert max(count["read"] for count in counts) < 0.3 * counts[0]["whole"]


def save_shards(run: RunSpec, root: Path) -> None:
    """A checkpoint of the weights that `load_and_compare` expects, written by several ranks."""
    from meshwright.checkpoint.run_checkpoints import weight_tensors

    training = build_training(run.with_(seed=7), build_mesh(run.parallel, here()))
    facts = {"run": run.model_dump(mode="json")}
    save_checkpoint(root, step=3, tensors=weight_tensors(training), facts=facts)


@pytest.mark.parametrize("kind", ["run directory", "checkpoint"])
def test_checkpoint_of_another_mesh(ranks, tmp_path: Path, kind: str):
    (tmp_path / "run").mkdir()
    ranks.run(save_shards, 2, run_of(MODEL, "x", dp_shard=2, zero=3), tmp_path / "run" / "checkpoints")
    start = tmp_path / "run" if kind == "run directory" else tmp_path / "run/checkpoints/step-00000003"
    ranks.run(load_and_compare, 3, run_of(MODEL, start, dp_shard=3, zero=1))


def test_experts_and_balance_bias(ranks, tmp_path: Path):
    model = shrunk_family("deepseek-v3")
    weights = whole_weights(model)
    for name, tensor in weights.items():
        if name.endswith("balance_bias"):
            tensor.copy_(torch.arange(len(tensor)))
    save_folder(weights, model, tmp_path / "hf")
    biases = ranks.run(loaded_biases, 2, run_of(model, tmp_path / "hf", dp_shard=2, zero=1))
    assert biases[0] and all(bias == list(range(8)) for rank in biases for bias in rank)


def loaded_biases(run: RunSpec) -> list[list[float]]:
    training = build_training(run, build_mesh(run.parallel, here()))
    load_initial_weights(run, training)
    stages = training.program.stages
    return [b.tolist() for stage in stages for n, b in stage.named_buffers() if n.endswith("balance_bias")]


def refusal(run: RunSpec) -> MeshwrightError:
    with pytest.raises(MeshwrightError) as caught:
        load_initial_weights(run, build_training(run, build_mesh(run.parallel, here())))
    return caught.value


def test_missing_folder_is_refused(ranks, tmp_path: Path):
    [error] = ranks.run(refusal, 1, run_of(MODEL, tmp_path / "none"))
    assert "there is no folder" in error.fact and error.where == "checkpoint.start_from"
    assert "run directory" in error.hint and error.exit_code == 2


def test_folder_without_weights_is_refused(ranks, tmp_path: Path):
    [error] = ranks.run(refusal, 1, run_of(MODEL, tmp_path))
    assert "neither a checkpoint nor a config.json" in error.fact and str(tmp_path) in error.where


def test_weights_without_permission_have_no_digest(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").mkdir()  # permissions do not bind the user of a container
    with pytest.raises(CheckpointError, match="the weights cannot be read"):
        base_digest(tmp_path)


def test_run_without_checkpoint_is_refused(ranks, tmp_path: Path):
    (tmp_path / "run.yaml").write_text("name: x")
    [error] = ranks.run(refusal, 1, run_of(MODEL, tmp_path))
    assert error.fact == "this run has no complete checkpoint yet"


def test_other_model_names_the_setting(ranks, folder: Path):
    errors = ranks.run(refusal, 2, run_of(MODEL.with_(num_layers=2), folder, dp_shard=2, zero=1))
    for error in errors:
        assert isinstance(error, CheckpointError) and "another model" in error.fact
        assert "model.num_layers is 3 there and 2 here" in error.fact and error.where == str(folder)


def test_checkpoint_of_a_deeper_model_is_refused(ranks, tmp_path: Path):
    ranks.run(save_shards, 1, run_of(MODEL, "x"), tmp_path / "checkpoints")
    [error] = ranks.run(refusal, 1, run_of(MODEL.with_(num_layers=2), tmp_path))
    assert "another model" in error.fact and "num_layers" in error.fact


def test_damage_on_one_rank_is_raised_on_all(ranks, folder: Path, tmp_path: Path):
    damaged = tmp_path / "hf"
    shutil.copytree(folder, damaged)
    index = json.loads((damaged / "model.safetensors.index.json").read_text())
    (damaged / index["weight_map"]["model.norm.weight"]).write_bytes(b"damaged")
    # The last stage alone reads the final norm: the first must hear of it.
    errors = ranks.run(refusal, 2, run_of(MODEL, damaged, pp=2))
    assert all("cannot read the file" in error.fact for error in errors)


def test_other_arithmetic_is_printed(ranks, folder: Path):
    assert MODEL.rope is not None
    changed = MODEL.with_(rope=MODEL.rope.with_(theta=1234.0))
    [printed] = ranks.run(printed_by_loading, 1, run_of(changed, folder))
    assert "model.rope.theta is 500000.0 there and 1234.0 here" in printed


def printed_by_loading(run: RunSpec) -> str:
    training = build_training(run, build_mesh(run.parallel, here()))
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        load_initial_weights(run, training)
    return printed.getvalue()
