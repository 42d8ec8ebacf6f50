"""The weights of a trained model as full tensors, read one at a time by one process.

They come from a checkpoint or run directory of any mesh, a Hugging Face folder, or a torch file.
"""

import pickle
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.adapters.merge import MergedTensors, QuantisedTensors
from meshwright.checkpoint.adapters import (
    base_record,
    read_adapters,
    with_base_found,
)
from meshwright.checkpoint.dcp_folder import DcpTensors, is_dcp_folder
from meshwright.checkpoint.external_names import under_our_names
from meshwright.checkpoint.initial import no_average, require_built_in, saved_model
from meshwright.checkpoint.load import load_tensors, read_manifest, saved_shapes, verify_files
from meshwright.checkpoint.locate import is_checkpoint, locate_weights
from meshwright.checkpoint.megatron_files import MegatronRankTensors, rank_files_folder
from meshwright.checkpoint.new_tokens import ExtendedTensors
from meshwright.checkpoint.start_folder import has_adapters, require_same_base, require_same_tensors
from meshwright.errors import CheckpointError, SpecError
from meshwright.models.decoder import Decoder, build_decoder
from meshwright.models.hf_weights import HuggingFaceReader
from meshwright.spec import ModelSpec, RunSpec
from meshwright.spec.adapter import NF4_FORMATS
from meshwright.spec.huggingface import load_model, model_at
from meshwright.spec.huggingface.names import state_shapes

TORCH_SUFFIXES = (".pt", ".pth")


@dataclass(frozen=True)
class Weights:
    """A model and its tensors under the names of this package; a tensor is read when it is accessed."""

    model: ModelSpec
    tensors: Mapping[str, Tensor]
    origin: Path
    run: RunSpec | None = None
    """The run of a checkpoint; None for other sources."""
    step: int | None = None
    adapters: Path | None = None
    """The checkpoint of adapters that are merged into the tensors."""


class CheckpointTensors(Mapping[str, Tensor]):
    """Full tensors of a checkpoint. The last one is cached: stacked experts are read many times in a row."""

    def __init__(self, folder: Path, saved_name: Mapping[str, str]) -> None:
        self._folder, self._saved_name = folder, saved_name
        self._shapes = saved_shapes(folder)
        self._last: tuple[str, Tensor] | None = None

    def __getitem__(self, name: str) -> Tensor:
        if self._last is None or self._last[0] != name:
            saved = self._saved_name[name]
            tensor = torch.empty(self._shapes[saved], dtype=torch.float32)
            load_tensors(self._folder, {saved: tensor})
            self._last = (name, tensor)
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._saved_name)

    def __len__(self) -> int:
        return len(self._saved_name)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor; none is read."""
        return {name: self._shapes[saved] for name, saved in self._saved_name.items()}


def saved_weights(run_dir: Path, *, step: int) -> CheckpointTensors:
    """Weights and buffers of a checkpoint under their names there, of built-in families and of modules."""
    folder = locate_weights(run_dir, where=str(run_dir), step=step)
    verify_files(folder, read_manifest(folder))
    names = [name for name in saved_shapes(folder) if name.startswith(("model.", "buffers."))]
    return CheckpointTensors(folder, {name: name for name in names})


class FolderTensors(Mapping[str, Tensor]):
    """Tensors of a Hugging Face folder under the names of this package, read from memory-mapped files."""

    def __init__(self, reader: HuggingFaceReader) -> None:
        self._reader = reader

    def __getitem__(self, name: str) -> Tensor:
        return self._reader.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._reader.names())

    def __len__(self) -> int:
        return len(self._reader.names())


def open_weights(
    path: str | Path,
    *,
    step: int | None = None,
    averaged: bool = False,
    model: ModelSpec | None = None,
    merges_adapters: bool = True,
    onto_original: bool = False,
) -> Weights:
    """The weights at a path; `averaged` takes the moving average, `model` is for files without a model.

    A checkpoint of adapters gives its base, with `merges_adapters` with the adapters merged in. A base in
    NF4 is the dequantised one that they were trained on, or with `onto_original` the one on disk.
    """
    path = Path(path).expanduser()
    if path.is_file():
        return _from_file(path, model)
    if is_dcp_folder(path):
        return _from_folder(path, DcpTensors(path), model)
    rank_files = rank_files_folder(path)
    if rank_files is not None:
        return _from_folder(rank_files, MegatronRankTensors(rank_files), model)
    if model is not None:
        raise _model_without_effect(path)
    folder = locate_weights(path, where=str(path), step=step)
    if is_checkpoint(folder):
        if has_adapters(read_manifest(folder)):
            return _with_adapters(
                folder, averaged=averaged, merges_adapters=merges_adapters, onto_original=onto_original
            )
        _require_adapters_wanted(folder, merges_adapters=merges_adapters)
        return _from_checkpoint(folder, averaged=averaged)
    _require_adapters_wanted(folder, merges_adapters=merges_adapters)
    if averaged:
        raise CheckpointError(
            "a Hugging Face folder has no average of the weights", where=str(folder), hint="leave --ema out"
        )
    there = model_at(folder)
    return Weights(there, FolderTensors(HuggingFaceReader(folder, there)), folder)


def _with_adapters(folder: Path, *, averaged: bool, merges_adapters: bool, onto_original: bool) -> Weights:
    """The base of a checkpoint of adapters, with the adapters merged in on access."""
    manifest = read_manifest(folder)
    verify_files(folder, manifest)
    if averaged and not merges_adapters:
        hint = "leave --ema or --no-adapter out"
        raise CheckpointError("the base of adapters has no average", where=str(folder), hint=hint)
    run = with_base_found(RunSpec.model_validate(manifest["run"]), manifest, folder)
    assert run.adapter is not None
    assert run.checkpoint.start_from is not None
    require_same_base(manifest.get("base"), base_record(run), folder)
    base = open_weights(run.checkpoint.start_from)
    tensors, model = base.tensors, run.model
    if run.checkpoint.new_tokens:
        tensors = ExtendedTensors(tensors, run.model, run.checkpoint.new_tokens)
    if run.adapter.base in ("fp8", *NF4_FORMATS) and not onto_original:
        tensors = QuantisedTensors(tensors, run.model, run.adapter.base)
    if merges_adapters:
        adapters = read_adapters(folder, run.model, run.adapter, averaged=averaged)
        tensors = MergedTensors(tensors, adapters, run.model, run.adapter)
        model = tensors.model
    merged = folder if merges_adapters else None
    return Weights(model, tensors, folder, run=run, step=manifest["step"], adapters=merged)


def _require_adapters_wanted(folder: Path, *, merges_adapters: bool) -> None:
    if not merges_adapters:
        hint = "leave --no-adapter out"
        raise CheckpointError("these weights have no adapters", where=str(folder), hint=hint)


def _from_checkpoint(folder: Path, *, averaged: bool) -> Weights:
    manifest = read_manifest(folder)
    verify_files(folder, manifest)
    require_built_in(manifest, folder)
    model = _spec(saved_model(manifest), folder)
    shapes = saved_shapes(folder)
    saved_name = {name: _saved_name(name, shapes, averaged=averaged) for name in state_shapes(model)}
    missing = [name for name, saved in saved_name.items() if saved not in shapes]
    if missing and averaged:
        raise no_average(folder)
    found = {name: shapes[saved] for name, saved in saved_name.items() if saved in shapes}
    require_same_tensors(model, found, folder, theirs={})
    run = RunSpec.model_validate(manifest["run"]) if "run" in manifest else None
    return Weights(model, CheckpointTensors(folder, saved_name), folder, run=run, step=manifest["step"])


def _saved_name(name: str, shapes: Mapping[str, Any], *, averaged: bool) -> str:
    """The name of a tensor in a checkpoint; buffers have no average."""
    if f"buffers.{name}" in shapes:
        return f"buffers.{name}"
    return f"ema.{name}" if averaged else f"model.{name}"


def _spec(values: Mapping[str, Any], where: Path) -> ModelSpec:
    try:
        return ModelSpec.model_validate(values)
    except ValueError:
        raise CheckpointError(
            "the model of these weights is not recorded",
            where=str(where),
            hint="use a checkpoint of this program",
        ) from None


def _from_file(path: Path, model: ModelSpec | None) -> Weights:
    if path.suffix not in TORCH_SUFFIXES:
        hint = "name a run directory, a checkpoint, a Hugging Face folder, or a .pt file"
        raise CheckpointError("this file is of no known kind of weights", where=str(path), hint=hint)
    content = _load_file(path)
    tensors = content.get("model", content.get("state_dict", content))
    saved_spec = content.get("spec") or {}
    if model is not None and saved_spec:
        raise _model_without_effect(path)
    if model is None and not saved_spec:
        hint = "name it with --model: a family, or a config.json"
        raise CheckpointError("the file does not record its model", where=str(path), hint=hint)
    model = _spec(saved_spec, path) if model is None else model
    found = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor)}
    ours = under_our_names(found, model)
    shapes = {name: tuple(ours[name].shape) for name in ours}
    require_same_tensors(model, shapes, path, theirs=saved_spec)
    step = content.get("step")
    return Weights(model, ours, path, step=step if isinstance(step, int) else None)


def _from_folder(folder: Path, theirs: Mapping[str, Tensor], model: ModelSpec | None) -> Weights:
    """The weights of a DCP folder or of Megatron's rank files; optimizer states are left out."""
    if model is None:
        hint = "name it with --model: a family, or a config.json"
        raise CheckpointError("the folder does not record its model", where=str(folder), hint=hint)
    ours = under_our_names(theirs, model)
    wanted = state_shapes(model)
    missing = [name for name in wanted if name not in ours]
    if missing:
        fact = f"{len(missing)} tensor(s) of the model are not in the folder, first {missing[0]}"
        hint = (
            "the names of torchtitan, Megatron core, Hugging Face and meshwright are known; is --model right?"
        )
        raise CheckpointError(fact, where=str(folder), hint=hint)
    tensors = _OnlyNames(ours, tuple(wanted))
    require_same_tensors(model, {name: tuple(tensors[name].shape) for name in tensors}, folder, theirs={})
    return Weights(model, tensors, folder)


class _OnlyNames(Mapping[str, Tensor]):
    """Some of the tensors of a mapping, read when they are accessed."""

    def __init__(self, tensors: Mapping[str, Tensor], names: tuple[str, ...]) -> None:
        self._tensors, self._names = tensors, names

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _model_without_effect(path: Path) -> CheckpointError:
    return CheckpointError(
        "--model has no effect: these weights record their model", where=str(path), hint="leave it out"
    )


def _load_file(path: Path) -> dict[str, Any]:
    """The content of a torch file, memory-mapped; tensors and plain values only, never code."""
    try:
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        fact = f"the file cannot be read as tensors: {str(error).splitlines()[0]}"
        raise CheckpointError(fact, where=str(path), hint="it must be written by torch.save") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"the file contains a {type(content).__name__}, not weights", where=str(path))
    return content


def build_model(weights: Weights, device: torch.device | str = "cpu") -> Decoder:
    """The full model on one device, in evaluation mode."""
    model = build_decoder(weights.model)
    model.to_empty(device=device)
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.zero_()  # buffers that are not saved
        for name, tensor in model.state_dict().items():
            tensor.copy_(weights.tensors[name])
    return model.eval()


def named_model(text: str) -> ModelSpec:
    """The model that --model names: a Hugging Face config, or a family."""
    try:
        return load_model(text)
    except SpecError as error:
        raise SpecError(error.fact, where=f"--model {text}", hint=error.hint) from None
