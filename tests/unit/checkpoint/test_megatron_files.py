"""Megatron's plain rank files: joined over tp, pp and interleaved stages; opening them runs no code."""

import argparse
import os
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.runs import MODELS
from tests.unit.checkpoint.test_external_weights import megatron
from torch import Tensor

from meshwright.checkpoint.convert import convert_weights
from meshwright.checkpoint.weights import open_weights
from meshwright.errors import CheckpointError
from meshwright.spec.huggingface.names import state_shapes

MODEL = MODELS["gqa"].with_(num_layers=4)


@pytest.fixture(autouse=True)
def four_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.unit.checkpoint.test_external_weights.MODEL", MODEL)


def our_weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in state_shapes(MODEL).items()}


def tp_part(name: str, tensor: Tensor, tp_rank: int, tp: int) -> Tensor:
    """What Megatron's tp rank has of a tensor."""
    if "linear_fc1.weight" in name:
        return torch.cat([half.chunk(tp)[tp_rank] for half in tensor.chunk(2)]).clone()
    if any(part in name for part in ("word_embeddings", "output_layer", "linear_qkv.weight")):
        return tensor.chunk(tp)[tp_rank].clone()
    if any(part in name for part in ("linear_proj.weight", "linear_fc2.weight")):
        return tensor.chunk(tp, dim=1)[tp_rank].clone()
    return tensor.clone()


def stage_names(names: list[str], layers: range, *, first: bool, last: bool) -> dict[str, str]:
    """Name in the file -> name in the unsharded model; the layers of a stage begin at 0."""
    found = {}
    for name in names:
        if name.startswith("decoder.layers."):
            layer = int(name.split(".")[2])
            if layer in layers:
                found[name.replace(f"layers.{layer}.", f"layers.{layer - layers.start}.")] = name
        elif name.startswith("embedding"):
            found |= {name: name} if first else {}
        elif last:
            found[name] = name
    return found


def write_files(root: Path, *, tp: int, pp: int, chunks: int = 1, extra: Any = None) -> None:
    # The vocabulary is padded to what tp divides.
    full = {
        name: torch.cat([tensor, torch.zeros(-len(tensor) % tp, tensor.shape[1])])
        if name.startswith(("embedding", "output_layer"))
        else tensor
        for name, tensor in megatron(our_weights()).items()
    }
    each = MODEL.num_layers // (pp * chunks)
    for tp_rank in range(tp):
        for pp_rank in range(pp):
            content: dict[str, Any] = {"iteration": 100, "args": extra, "optimizer": {"step": 3}}
            for chunk in range(chunks):
                number = chunk * pp + pp_rank
                layers = range(number * each, (number + 1) * each)
                names = stage_names(list(full), layers, first=number == 0, last=number == pp * chunks - 1)
                content["model" if chunks == 1 else f"model{chunk}"] = {
                    name: tp_part(name, full[there], tp_rank, tp) for name, there in names.items()
                } | {"decoder.layers.0.self_attention.linear_qkv._extra_state": None}
            suffix = f"_{pp_rank:03d}" if pp > 1 else ""
            folder = root / "iter_0000100" / f"mp_rank_{tp_rank:02d}{suffix}"
            folder.mkdir(parents=True)
            torch.save(content, folder / "model_optim_rng.pt")
    (root / "latest_checkpointed_iteration.txt").write_text("100\n")


@pytest.mark.parametrize(("tp", "pp", "chunks"), [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (2, 2, 2)])
def test_rank_files_of_any_layout(tmp_path: Path, tp: int, pp: int, chunks: int) -> None:
    write_files(tmp_path / "run", tp=tp, pp=pp, chunks=chunks)
    opened = open_weights(tmp_path / "run", model=MODEL)
    weights = our_weights()
    assert all(torch.equal(opened.tensors[name], tensor) for name, tensor in weights.items())
    convert_weights(open_weights(tmp_path / "run/iter_0000100", model=MODEL), tmp_path / "out", "huggingface")
    again = open_weights(tmp_path / "out")
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in weights.items())


class Touch:
    """Makes a folder when it is opened by a plain unpickler."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self._path),)


def _made(path: str) -> None:
    """A function that a file names and that must not be called."""
    os.mkdir(path)


class TouchByOurs(Touch):
    def __reduce__(self) -> tuple[object, ...]:
        return _made, (str(self._path),)


def test_arguments_of_unknown_classes_are_dropped_and_nothing_is_called(tmp_path: Path) -> None:
    module = types.ModuleType("megatron_for_this_test")
    backend = type("Backend", (), {"__module__": module.__name__})
    module.Backend = backend  # pyright: ignore[reportAttributeAccessIssue]
    sys.modules[module.__name__] = module
    sign = TouchByOurs(tmp_path / "executed")
    arguments = argparse.Namespace(backend=backend(), sign=sign, state=np.random.get_state())
    try:
        write_files(tmp_path / "run", tp=1, pp=1, extra=arguments)
    finally:
        del sys.modules[module.__name__]
    opened = open_weights(tmp_path / "run", model=MODEL)
    assert all(torch.equal(opened.tensors[name], tensor) for name, tensor in our_weights().items())
    assert not (tmp_path / "executed").exists()


def test_a_file_that_would_run_a_command_is_refused(tmp_path: Path) -> None:
    write_files(tmp_path / "run", tp=1, pp=1, extra=Touch(tmp_path / "executed"))
    with pytest.raises(CheckpointError, match="more in it than tensors and plain values"):
        open_weights(tmp_path / "run", model=MODEL)
    assert not (tmp_path / "executed").exists()


def test_a_missing_rank_and_experts_are_refused(tmp_path: Path) -> None:
    write_files(tmp_path / "run", tp=2, pp=2)
    folder = tmp_path / "run/iter_0000100"
    (folder / "mp_rank_01_001" / "model_optim_rng.pt").unlink()
    with pytest.raises(CheckpointError, match="the file of tp rank 1 and pp rank 1 is missing"):
        open_weights(tmp_path / "run", model=MODEL)
    (folder / "mp_rank_01_000").rename(folder / "mp_rank_01_000_001")
    with pytest.raises(CheckpointError, match="mp_rank_01_000_001 is not a folder of a tp and pp rank"):
        open_weights(tmp_path / "run", model=MODEL)
