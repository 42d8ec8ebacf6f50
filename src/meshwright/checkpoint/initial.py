"""Initial weights from somewhere else, each rank reading only its own part.

hugging face folder   config.json and safetensors; a rank reads the slices that it owns
checkpoint            a folder step-<n>, or one that `meshwright convert` wrote
run directory         its last complete checkpoint
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.checkpoint.live import LiveTraining
from meshwright.checkpoint.load import load_tensors, read_manifest, saved_shapes, verify_files
from meshwright.checkpoint.locate import is_checkpoint, locate_weights
from meshwright.checkpoint.run_checkpoints import take_masters, weight_tensors
from meshwright.errors import CheckpointError, MeshwrightError
from meshwright.models.interop import HuggingFaceReader
from meshwright.models.names import state_shapes
from meshwright.optim.build import set_master_weights
from meshwright.parallel.shards import global_slices
from meshwright.spec import ModelSpec, RunSpec
from meshwright.spec.huggingface import load_model

_WHERE = "checkpoint.start_from"
# What a run may set otherwise than the model that its weights come from, without a word.
_OF_TRAINING = ("family", "dropout", "init_std", "scaled_residual_init")


def load_initial_weights(run: RunSpec, training: LiveTraining) -> None:
    """Weights from `checkpoint.start_from`; without it the model keeps its random start.

    All ranks call it. Everything else (optimizer, data position, step) starts anew, and an average of
    the weights begins at the loaded ones.
    """
    if run.checkpoint.start_from is None:
        return
    folder = locate_weights(run.checkpoint.start_from, where=_WHERE)
    with training.weights.at_hand(changing=True):
        if is_checkpoint(folder):
            _load_checkpoint(run, training, folder)
        else:
            agree(lambda: _load_hugging_face(run, training, folder))
        training.program.gather_parameters()
    if training.ema is not None:
        training.ema.restart()


def agree(action: Callable[[], None]) -> None:
    """Do something on every rank; what one of them refuses is raised on all."""
    refusal: MeshwrightError | None = None
    try:
        action()
    except MeshwrightError as error:
        refusal = error
    refusals: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(refusals, refusal)
    for found in refusals:
        if found is not None:
            raise found


def _load_hugging_face(run: RunSpec, training: LiveTraining, folder: Path) -> None:
    there = load_model(str(folder))
    require_same_tensors(run.model, state_shapes(there), folder, theirs=there.model_dump(mode="json"))
    reader = HuggingFaceReader(folder, run.model)
    with torch.no_grad():
        for one in training.program.shards:
            value = reader.read_slice(one.name, global_slices(one))
            if one.name in training.named_shards:
                set_master_weights(training.optimizer, training.named_shards, {one.name: value})
            else:
                one.shard.copy_(value)
        for stage in training.program.stages:
            for name, buffer in stage.named_buffers():
                if name in reader.shapes:
                    buffer.copy_(reader.read(name))
    _tell_differences(run.model, there.model_dump(mode="json"), folder)


def _load_checkpoint(run: RunSpec, training: LiveTraining, folder: Path) -> None:
    manifest = read_manifest(folder)
    theirs = saved_model(manifest)
    kinds = ("model.", "buffers.")
    shapes = {
        name.split(".", 1)[1]: shape for name, shape in saved_shapes(folder).items() if name.startswith(kinds)
    }
    require_same_tensors(run.model, shapes, folder, theirs=theirs)
    verify_files(folder, manifest)
    tensors = weight_tensors(training)
    load_tensors(folder, tensors)
    take_masters(training, tensors)
    _tell_differences(run.model, theirs, folder)


def saved_model(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The model of a checkpoint: a run's own, or what `meshwright convert` was told."""
    model = manifest["run"]["model"] if "run" in manifest else manifest.get("model")
    return dict(model) if model else {}


def require_same_tensors(
    model: ModelSpec, shapes: Mapping[str, tuple[int, ...]], folder: Path, *, theirs: Mapping[str, Any]
) -> None:
    """Refuse weights that are not, tensor for tensor, those of the model; say which setting differs."""
    ours = state_shapes(model)
    different = [name for name in sorted(ours.keys() | shapes.keys()) if ours.get(name) != shapes.get(name)]
    if not different:
        return
    settings = "; ".join(differing_settings(theirs, model.model_dump(mode="json")))
    name = different[0]
    raise CheckpointError(
        f"the weights are of another model: {name} has shape {shapes.get(name, 'none')} there and "
        f"{ours.get(name, 'none')} in this run, and so on for {len(different)} tensors"
        + (f" ({settings})" if settings else ""),
        where=str(folder),
        hint="use the model of the weights: name its folder as `model`, or correct the values above",
    )


def differing_settings(theirs: Mapping[str, Any], ours: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """`model.width is 64 there and 32 here`, for settings that decide what is computed."""
    for name, value in ours.items():
        if not theirs or (not prefix and name in _OF_TRAINING) or theirs.get(name) == value:
            continue
        inner = theirs.get(name)
        if isinstance(value, dict) and isinstance(inner, dict):
            yield from differing_settings(inner, value, f"{prefix}{name}.")
        else:
            yield f"model.{prefix}{name} is {inner} there and {value} here"


def _tell_differences(model: ModelSpec, theirs: Mapping[str, Any], folder: Path) -> None:
    """Same tensors, other arithmetic (rotary base, window): may be meant, so it is only said."""
    found = list(differing_settings(theirs, model.model_dump(mode="json")))
    if found and dist.get_rank() == 0:
        print(f"note: weights from {folder}, but {'; '.join(found)}", file=sys.stderr)
