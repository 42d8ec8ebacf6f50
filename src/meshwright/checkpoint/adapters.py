"""Adapters in checkpoints: they are saved without the base, which is recorded by its path and a digest."""

import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.adapters.peft_folder import is_peft_folder
from meshwright.adapters.peft_read import PeftReader
from meshwright.checkpoint.digest import content_id
from meshwright.checkpoint.index import read_index
from meshwright.checkpoint.live import LiveTraining
from meshwright.checkpoint.load import load_tensors, read_manifest, saved_shapes, verify_files
from meshwright.checkpoint.locate import is_checkpoint, locate_weights
from meshwright.checkpoint.new_tokens import read_with_new_rows
from meshwright.checkpoint.start_folder import (
    START_HINT,
    folder_digest,
    no_adapters,
    require_adapters,
    require_base_of,
    require_same_adapter,
    require_same_base,
    saved_adapter,
    without_new_tokens,
)
from meshwright.errors import CheckpointError
from meshwright.models.hf_weights import HuggingFaceReader
from meshwright.optim.build import set_master_weights
from meshwright.parallel.shards import ParameterShard, global_slices
from meshwright.spec import AdapterSpec, ModelSpec, RunSpec
from meshwright.spec.adapter import adapter_parameters, trained_in_full
from meshwright.spec.parameters import parameters

_START = "adapter.start_from"


def adapter_of(run: object) -> AdapterSpec | None:
    """The adapter of a spec; the specs of user modules have none."""
    return run.adapter if isinstance(run, RunSpec) else None


def saved_shards(run: object, training: LiveTraining) -> list[ParameterShard]:
    """The parameters that a checkpoint saves: all, or with adapters only those that are trained."""
    shards = training.program.shards
    return shards if adapter_of(run) is None else [one for one in shards if one.parameter.requires_grad]


def base_record(run: RunSpec) -> dict[str, str] | None:
    """Path and digest of the base of a run's adapters; None where the base is not read from files."""
    if run.adapter is None or run.checkpoint.start_from is None:
        return None
    folder = locate_weights(run.checkpoint.start_from, where="checkpoint.start_from")
    return {"path": str(folder.resolve()), "digest": base_digest(folder)}


def with_base_found(run: RunSpec, manifest: Mapping[str, Any], folder: Path) -> RunSpec:
    """The run of a checkpoint of adapters, with the path at which its base is found now.

    A relative path in the run is one of the directory it was started in, so its full path is tried next.
    """
    start, recorded = run.checkpoint.start_from, (manifest.get("base") or {}).get("path")
    if start is None:
        raise CheckpointError("the adapters' base is not recorded", where=str(folder))
    found = found_base(run, manifest)
    if found is None:
        raise CheckpointError(
            f"the base of the adapters is no longer at {recorded or start}",
            where=str(folder),
            hint="put it back there, or make a link there to its new place",
        )
    return run.with_(checkpoint=run.checkpoint.with_(start_from=found))


def found_base(run: RunSpec, manifest: Mapping[str, Any]) -> str | None:
    """The path at which the base of adapters is found now; None where it is at neither."""
    known = (run.checkpoint.start_from, (manifest.get("base") or {}).get("path"))
    return next((one for one in known if one and Path(one).expanduser().exists()), None)


def base_digest(folder: Path) -> str:
    """A digest of the weights in a folder: of a checkpoint's hashes, or `folder_digest`."""
    if is_checkpoint(folder):
        files = read_manifest(folder)["files"]
        ids = "".join(sorted(map(content_id, files.values())))
        return hashlib.sha256(ids.encode()).hexdigest()[:32]
    return folder_digest(folder)


@torch.no_grad()
def load_adapters(run: RunSpec, training: LiveTraining, *, averaged: bool = False) -> None:
    """Load adapters from `adapter.start_from`, where it is set; all ranks call it."""
    adapter = run.adapter
    if adapter is None or adapter.start_from is None:
        return
    shards = [one for one in training.program.shards if one.parameter.requires_grad]
    folder = Path(adapter.start_from).expanduser()
    if is_peft_folder(folder):
        reader = PeftReader(
            folder,
            run.model,
            adapter,
            trained=trained_in_full(run.model, adapter, run.train_only),
            read_base_rows=partial(_read_base_rows, run),
        )
        if reader.there.base_digest is not None:
            require_base_of(reader.there, base_record(run))
        named = set(reader.names())
        values = {
            one.name: reader.read_slice(one.name, global_slices(one)) for one in shards if one.name in named
        }
    else:
        values = _checkpoint_values(run, training, folder, averaged=averaged)
    set_master_weights(training.optimizer, training.named_shards, values)


def _read_base_rows(run: RunSpec, table: str, ids: list[int]) -> Tensor:
    """Rows of an embedding or head of the base, by our name."""
    assert run.checkpoint.start_from is not None
    folder, num_new = locate_weights(run.checkpoint.start_from, where=_START), run.checkpoint.new_tokens
    if is_checkpoint(folder):
        name = f"model.{table}"
        value = torch.empty(saved_shapes(folder)[name], dtype=torch.float32)
        load_tensors(folder, {name: value})
        return value[ids]
    reader = HuggingFaceReader(folder, without_new_tokens(run.model, num_new))
    width, num_there = slice(0, run.model.width), reader.model.vocab_size
    # New tokens start as one and the same row, which is the mean of a full table: it is read once.
    distinct = {min(one, num_there): slice(one, one + 1) for one in ids}
    rows = {
        place: read_with_new_rows(reader, table, (row, width), num_new) for place, row in distinct.items()
    }
    return torch.cat([rows[min(one, num_there)] for one in ids])


def _checkpoint_values(
    run: RunSpec, training: LiveTraining, folder: Path, *, averaged: bool
) -> dict[str, Tensor]:
    """This rank's shards of what a checkpoint of adapters has: adapters, and what was trained beside them."""
    folder = locate_weights(folder, where=_START, hint=START_HINT)
    if not is_checkpoint(folder):
        raise no_adapters(folder)
    manifest = read_manifest(folder)
    verify_files(folder, manifest)
    require_adapters(manifest, folder)
    require_same_base(manifest.get("base"), base_record(run), folder)
    require_same_adapter(saved_adapter(manifest, folder), run.adapter, folder)
    prefix = "ema" if averaged else "model"
    saved = saved_shapes(folder)
    if averaged and not any(name.startswith("ema.") for name in saved):
        hint = "leave --ema out; optim.ema_decay keeps one"
        raise CheckpointError("the run has no average of its weights", where=str(folder), hint=hint)
    _require_all_trained(run, [name.removeprefix("model.") for name in saved], folder)
    tensors = {
        one.name: one.as_global(torch.empty_like(one.shard))
        for one in training.program.shards
        if f"{prefix}.{one.name}" in saved and one.parameter.requires_grad
    }
    load_tensors(folder, {f"{prefix}.{name}": tensor for name, tensor in tensors.items()})
    return {name: tensor.to_local() for name, tensor in tensors.items()}


def _require_all_trained(run: RunSpec, saved: Sequence[str], folder: Path) -> None:
    """Refuse parameters that were trained in full there and are those of the base in this run."""
    own = {one.name for one in parameters(run.model)}
    trained = trained_in_full(run.model, run.adapter, run.train_only)
    left_out = [name for name in saved if name in own and name not in trained]
    if left_out:
        others = f", and {len(left_out) - 1} more parameters like it" if left_out[1:] else ""
        raise CheckpointError(
            f"{left_out[0]} was trained in full there, and is frozen in this run{others}",
            where=str(folder),
            hint="set train_only to the value there",
        )


def read_adapters(
    folder: Path, model: ModelSpec, adapter: AdapterSpec, *, averaged: bool
) -> dict[str, Tensor]:
    """The full tensors of a checkpoint of adapters, and what was trained in full beside them, in fp32."""
    prefix = "ema." if averaged else "model."
    index = read_index(folder)
    names = [name for name in index if name.startswith(prefix)]
    tensors = {name: torch.empty(index[name].shape, dtype=torch.float32) for name in names}
    load_tensors(folder, tensors)
    found = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    missing = [one.name for one in adapter_parameters(model, adapter) if one.name not in found]
    if missing:
        hint = "leave --ema out; optim.ema_decay keeps one" if averaged else "use an older checkpoint"
        raise CheckpointError(f"the checkpoint has no {missing[0]}", where=str(folder), hint=hint)
    return found
