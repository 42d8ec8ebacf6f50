"""Converts weights between checkpoint, Hugging Face folder and torch file. Nothing is overwritten.

A target appears under its name only when it is complete.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from meshwright import __version__
from meshwright.adapters.merge import MergedTensors
from meshwright.adapters.peft_config import CONFIG_FILE
from meshwright.adapters.peft_folder import WEIGHTS_FILE
from meshwright.adapters.peft_write import write_peft
from meshwright.adapters.vllm_rules import vllm_note
from meshwright.checkpoint.export import exported_files, source_dtype
from meshwright.checkpoint.load import read_manifest
from meshwright.checkpoint.save import save_in_groups
from meshwright.checkpoint.source_files import keep_source_files
from meshwright.checkpoint.weights import TORCH_SUFFIXES, Weights
from meshwright.errors import CheckpointError
from meshwright.files import new_folder_beside
from meshwright.models.hf_weights import DEFAULT_SHARD_BYTES, save_folder
from meshwright.spec.adapter import NF4_FORMATS

Form = Literal["huggingface", "checkpoint", "torch", "peft"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def form_of_target(weights: Weights, target: Path) -> Form:
    """The form of a target: torch for a .pt file, checkpoint from a Hugging Face folder, else huggingface."""
    if target.suffix in TORCH_SUFFIXES:
        return "torch"
    return "checkpoint" if (weights.origin / "config.json").is_file() else "huggingface"


def convert_weights(
    weights: Weights,
    target: Path,
    form: Form,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Write the weights in another form; raises CheckpointError for a target that exists."""
    if target.exists() or target.is_symlink():
        raise CheckpointError("this already exists", where=str(target), hint="name a new folder or file")
    dtype = written_dtype(weights, dtype)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if form == "huggingface":
            _write_folder(weights, target, dtype=dtype, max_shard_bytes=max_shard_bytes)
        elif form == "peft":
            _write_peft(weights, target)
        elif form == "torch":
            _write_file(weights, target, dtype=dtype)
        else:
            _write_checkpoint(weights, target, dtype=dtype, max_shard_bytes=max_shard_bytes)
    except (OSError, SafetensorError, RuntimeError) as error:
        why = error.strerror if isinstance(error, OSError) else _disk_error_text(error)
        if why is None:
            raise
        raise CheckpointError(
            f"cannot be written: {why}", where=str(target), hint="free disk space, or name another place"
        ) from None


def merge_note(weights: Weights, dtype: torch.dtype | None, *, onto_original: bool = False) -> str | None:
    """What merging adapters changed, to print: into which weights, and the share that differs after it."""
    if not isinstance(weights.tensors, MergedTensors):
        return None
    dtype = written_dtype(weights, dtype) or torch.float32
    share = weights.tensors.changed_share(dtype)
    name = str(dtype).removeprefix("torch.")
    base = _merged_into(quantised_base(weights), onto_original=onto_original)
    return f"adapters are merged{base}: {share:.1%} of the adapted weights differ from the base in {name}"


def written_dtype(weights: Weights, dtype: torch.dtype | None) -> torch.dtype | None:
    """The dtype of all written tensors: the one given, or of merged weights that of their base.

    None leaves each tensor as it is. Merged tensors are in fp32 beside others in the dtype of the base.
    """
    if dtype is None and isinstance(weights.tensors, MergedTensors):
        return source_dtype(weights) or next(iter(weights.tensors.base.values())).dtype
    return dtype


def quantised_base(weights: Weights) -> str | None:
    """The format of the frozen weights in training, where the base on disk has another one."""
    adapter = weights.run.adapter if weights.run is not None else None
    return adapter.base if adapter is not None and adapter.base in ("fp8", *NF4_FORMATS) else None


def _merged_into(quantised: str | None, *, onto_original: bool) -> str:
    if quantised is None:
        return ""
    if onto_original:
        return f" into the original weights, not into those in {quantised} that they were trained on"
    return f" into the weights in {quantised} that they were trained on (--onto-original takes those on disk)"


def serving_note(weights: Weights, folder: Path) -> str | None:
    """What to do so that a server computes what was trained, to print; None where its defaults do."""
    with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
        opened = vllm_note(json.loads((folder / CONFIG_FILE).read_text()), list(file.keys()))
    quantised = quantised_base(weights)
    if quantised is None:
        return opened
    rounded = f"the adapters were trained on a base in {quantised}; on the base in 16 bits the answers differ"
    return f"{rounded}\n{opened}" if opened else rounded


def _disk_error_text(error: Exception) -> str | None:
    """The disk error behind an error of safetensors or torch.save; None for anything else."""
    if "inline_container" in str(error):
        return "torch.save could not write the file completely"
    return str(error).splitlines()[0] if isinstance(error, SafetensorError) else None


def _write_folder(weights: Weights, target: Path, *, dtype: torch.dtype | None, max_shard_bytes: int) -> None:
    """Write a Hugging Face folder, one file in memory at a time, with all that came in beside the weights."""
    dtype = dtype or source_dtype(weights) or next(iter(weights.tensors.values())).dtype
    files = exported_files(weights, dtype)
    save_folder(
        weights.tensors, weights.model, target, max_shard_bytes=max_shard_bytes, dtype=dtype, files=files
    )


def _write_peft(weights: Weights, target: Path) -> None:
    """Write the adapters of a checkpoint as a peft folder."""
    if not isinstance(weights.tensors, MergedTensors) or weights.run is None or weights.run.adapter is None:
        hint = "name the run directory of a run with `adapter`"
        raise CheckpointError("these weights have no adapters", where=str(weights.origin), hint=hint)
    base = read_manifest(weights.origin).get("base") or {}
    write_peft(
        target,
        weights.run.model,
        weights.run.adapter,
        weights.tensors.adapters,
        base=base.get("path"),
        base_digest=base.get("digest"),
        merged=weights.tensors,
    )


def _write_file(weights: Weights, target: Path, *, dtype: torch.dtype | None) -> None:
    """Write a torch file; torch.save needs all tensors in memory at once."""
    content = {
        "model": {name: _cast(weights.tensors[name], dtype).clone() for name in weights.tensors},
        "spec": weights.model.model_dump(mode="json"),
        "step": weights.step,
    }
    folder = new_folder_beside(target)
    try:
        torch.save(content, folder / target.name)
        os.link(folder / target.name, target)  # refuses what appeared in the meantime
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write_checkpoint(
    weights: Weights, target: Path, *, dtype: torch.dtype | None, max_shard_bytes: int
) -> None:
    """Write a checkpoint of the weights alone, for `checkpoint.start_from`, one file in memory at a time."""
    draft = new_folder_beside(target)
    try:
        facts = {
            "model": weights.model.model_dump(mode="json"),
            "source": str(weights.origin),
            "versions": {"meshwright": __version__, "torch": torch.__version__},
        }
        groups = _groups(weights.tensors, dtype, max_shard_bytes)
        folder = save_in_groups(draft, step=weights.step or 0, groups=groups, facts=facts)
        keep_source_files(weights.origin, folder)
        folder.rename(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _groups(
    tensors: Mapping[str, Tensor], dtype: torch.dtype | None, max_bytes: int
) -> Iterator[dict[str, Tensor]]:
    """The tensors under their names in a checkpoint, in groups of at most `max_bytes`."""
    group: dict[str, Tensor] = {}
    for name in tensors:
        tensor = _cast(tensors[name], dtype)
        if group and sum(one.nbytes for one in group.values()) + tensor.nbytes > max_bytes:
            yield group
            group = {}
        group[_saved_name(name)] = tensor
        del tensor
    yield group


def _saved_name(name: str) -> str:
    return f"buffers.{name}" if name.endswith("balance_bias") else f"model.{name}"


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor if dtype is None else tensor.to(dtype)
