"""Initial weights from another run or model; each rank reads only its own shards.

hugging face folder   config.json and safetensors; a rank reads the slices of its shards
checkpoint            a folder step-<n>, or one that `meshwright convert` wrote
run directory         its newest complete checkpoint
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.adapters.attach import set_magnitudes
from meshwright.checkpoint.adapters import load_adapters
from meshwright.checkpoint.live import LiveTraining
from meshwright.checkpoint.load import load_tensors, read_manifest, saved_shapes
from meshwright.checkpoint.locate import is_checkpoint, locate_weights
from meshwright.checkpoint.new_tokens import read_with_new_rows
from meshwright.checkpoint.packed_base import load_fp8, load_nested
from meshwright.checkpoint.run_checkpoints import set_loaded_masters, weight_tensors
from meshwright.checkpoint.save import on_all_ranks
from meshwright.checkpoint.start_folder import (
    differing_settings,
    has_adapters,
    require_same_model,
    require_same_tensors,
    without_new_tokens,
)
from meshwright.data.tokenize import has_other_tokenizer
from meshwright.errors import CheckpointError
from meshwright.models.hf_weights import HuggingFaceReader
from meshwright.models.initialise import unpacked_slices
from meshwright.ops.nf4 import quantise_nf4
from meshwright.optim.build import set_master_weights
from meshwright.parallel.shards import ParameterShard, global_slices
from meshwright.spec import ModelSpec, RunSpec
from meshwright.spec.adapter import NF4_FORMATS, adapted_weight

_WHERE = "checkpoint.start_from"
ABSMAX = "_absmax"


def load_initial_weights(run: RunSpec, training: LiveTraining, *, averaged: bool = False) -> None:
    """Load weights from `checkpoint.start_from` and adapters from `adapter.start_from`; without these the
    model keeps its random weights.

    All ranks call it. Everything else (optimizer, data position, step) starts from zero, and an average of
    the weights begins at the loaded ones. `averaged` loads the moving average of a checkpoint's weights.
    """
    load_base(run, training, averaged=averaged)
    load_initial_adapters(run, training, averaged=averaged)


def load_base(run: RunSpec, training: LiveTraining, *, averaged: bool = False) -> None:
    """Load weights from `checkpoint.start_from`, where it is set; all ranks call it."""
    if run.checkpoint.start_from is None:
        _refuse_random_base(run)
        return
    folder = locate_weights(run.checkpoint.start_from, where=_WHERE)
    with training.weights.all_on_device(changing=True):
        if is_checkpoint(folder):
            _load_checkpoint(run, training, folder, averaged=averaged)
        else:
            on_all_ranks(lambda: _load_hugging_face(run, training, folder))
        for stage in training.program.stages:
            set_magnitudes(stage)
        training.program.gather_parameters()
    if training.ema is not None:
        training.ema.restart()


def load_initial_adapters(run: RunSpec, training: LiveTraining, *, averaged: bool = False) -> None:
    """Load adapters from `adapter.start_from`, where it is set, beside a loaded base; all ranks call it."""
    if run.adapter is None or run.adapter.start_from is None:
        return
    with training.weights.all_on_device(changing=True):
        on_all_ranks(lambda: load_adapters(run, training, averaged=averaged))
        training.program.gather_parameters()
    if training.ema is not None:
        training.ema.restart()


def _refuse_random_base(run: RunSpec) -> None:
    if run.adapter is not None:
        hint = "name the base: a Hugging Face folder, a checkpoint or a run directory"
        raise CheckpointError("adapters need a trained base", where=_WHERE, hint=hint)


def _load_hugging_face(run: RunSpec, training: LiveTraining, folder: Path) -> None:
    there, num_new = require_same_model(run, folder), run.checkpoint.new_tokens
    expected = without_new_tokens(run.model, num_new)
    reader = HuggingFaceReader(folder, expected)
    with torch.no_grad():
        shards = {one.name: one for one in _base_shards(training)}
        stored = load_fp8(reader, training.program.stages, shards)
        stored |= load_nested(reader, training.program.stages, shards)
        for one in shards.values():
            if one.name.endswith(ABSMAX) or one.name in stored:
                continue  # the absmax follows from the weight
            if f"{one.name}{ABSMAX}" in shards:
                _quantise(reader, one, shards[f"{one.name}{ABSMAX}"])
                continue
            value = read_with_new_rows(reader, one.name, global_slices(one), num_new)
            if one.name in training.named_shards:
                set_master_weights(training.optimizer, training.named_shards, {one.name: value})
            else:
                one.shard.copy_(value)
        for stage in training.program.stages:
            for name, buffer in stage.named_buffers():
                if name in reader.shapes:
                    buffer.copy_(reader.read(name))
    _print_differences(expected, there.model_dump(mode="json"), folder)
    if dist.get_rank() == 0 and has_other_tokenizer(run.data, folder):
        fact = f"the data was packed with another tokenizer than that of {folder}"
        print(f"note: {fact}; its tokens mean other things to these weights", file=sys.stderr)


def _load_checkpoint(run: RunSpec, training: LiveTraining, folder: Path, *, averaged: bool) -> None:
    manifest = on_all_ranks(lambda: read_manifest(folder))
    if has_adapters(manifest):
        hint = "name their base here, and the adapters in adapter.start_from"
        raise CheckpointError("this checkpoint has adapters without their base", where=_WHERE, hint=hint)
    if run.checkpoint.new_tokens:
        hint = "convert it to a Hugging Face folder first: `meshwright convert`"
        raise CheckpointError(
            "new_tokens reads Hugging Face folders", where="checkpoint.new_tokens", hint=hint
        )
    if run.adapter is not None and run.adapter.base in ("fp8", *NF4_FORMATS):
        fact = f"adapter.base={run.adapter.base} reads Hugging Face folders"
        hint = "convert it to a Hugging Face folder first: `meshwright convert`"
        raise CheckpointError(fact, where=_WHERE, hint=hint)
    theirs = saved_model(manifest)
    kinds = ("model.", "buffers.")
    saved = saved_shapes(folder)
    shapes = {name.split(".", 1)[1]: shape for name, shape in saved.items() if name.startswith(kinds)}
    require_same_tensors(run.model, shapes, folder, theirs=theirs)
    adapters = {f"model.{one.name}" for one in training.program.shards} - {
        f"model.{one.name}" for one in _base_shards(training)
    }
    tensors = weight_tensors(training)
    base = {name: tensor for name, tensor in tensors.items() if name not in adapters}
    wanted = _averages(base, saved, folder) if averaged and run.adapter is None else base
    on_all_ranks(lambda: load_tensors(folder, wanted, files=manifest["files"]))
    set_loaded_masters(training, tensors)
    _print_differences(run.model, theirs, folder)


def _quantise(reader: HuggingFaceReader, packed: ParameterShard, absmax: ParameterShard) -> None:
    """Read this rank's part of a weight and store it in NF4; the 16-bit weight is freed at once."""
    value = reader.read_slice(packed.name, unpacked_slices(global_slices(packed)))
    for one, part in zip((packed, absmax), quantise_nf4(value.to(packed.shard.device)), strict=True):
        one.shard.copy_(part)


def _base_shards(training: LiveTraining) -> list[ParameterShard]:
    """The parameters of the model itself, without those of adapters."""
    return [one for one in training.program.shards if adapted_weight(one.name) is None]


def _averages(
    tensors: Mapping[str, torch.Tensor], saved: Mapping[str, Any], folder: Path
) -> dict[str, torch.Tensor]:
    """The tensors under the names of their moving averages; buffers have none."""
    if not any(name.startswith("ema.") for name in saved):
        raise no_average(folder)
    renamed = {name: name.replace("model.", "ema.", 1) for name in tensors}
    return {renamed[name] if renamed[name] in saved else name: tensor for name, tensor in tensors.items()}


def no_average(folder: Path) -> CheckpointError:
    """The error of a checkpoint without a moving average of the weights."""
    hint = "leave --ema out; optim.ema_decay keeps one"
    return CheckpointError("the run has no average of its weights", where=str(folder), hint=hint)


def require_built_in(manifest: Mapping[str, Any], folder: Path) -> None:
    """Refuse a checkpoint of a user's module: nothing in it describes the module."""
    if not saved_model(manifest):
        raise CheckpointError(
            "these weights are of a Python module (meshwright.fit or prepare), which the directory does not "
            "record",
            where=str(folder),
            hint="load them into the module with meshwright.load_weights(model, directory)",
        )


def saved_model(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The model settings in a manifest, of a run or of `meshwright convert`; empty where there are none."""
    run = manifest.get("run")
    model = run.get("model") if isinstance(run, dict) else manifest.get("model")
    return dict(model) if isinstance(model, dict) else {}


def _print_differences(model: ModelSpec, theirs: Mapping[str, Any], folder: Path) -> None:
    """Print settings that differ though the tensors are equal (rotary base, window): it may be intended."""
    found = list(differing_settings(theirs, model.model_dump(mode="json")))
    if found and dist.get_rank() == 0:
        print(f"note: weights from {folder}, but {'; '.join(found)}", file=sys.stderr)
