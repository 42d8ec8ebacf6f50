"""Reads adapters from a peft folder; a rank reads only the slices of its shards."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from meshwright.adapters.peft_names import PeftMatrix, peft_matrices
from meshwright.adapters.peft_write import BASE_DIGEST, CONFIG_FILE, WEIGHTS_FILE
from meshwright.errors import CheckpointError
from meshwright.files import MIB, read_json_file, regular_file
from meshwright.spec import AdapterSpec, ModelSpec
from meshwright.spec.adapter import LORA_B

_MAX_CONFIG_BYTES = 16 * MIB


def is_peft_folder(folder: Path) -> bool:
    """Whether this folder has adapters in peft's format."""
    return (folder / CONFIG_FILE).is_file()


class PeftReader:
    """The adapters of a folder under our names, at the scales of a run's own adapters."""

    def __init__(self, folder: Path, model: ModelSpec, adapter: AdapterSpec) -> None:
        """Open the folder and check that it has exactly these adapters."""
        self.folder, self._adapter = folder, adapter
        self._config = self._read_config()
        self._file = self._open()
        # A file that peft wrote from memory may have the adapter's name in its keys.
        self._disk_name = {key.replace(".default.", "."): key for key in self._file.keys()}  # noqa: SIM118
        self._parts: dict[str, tuple[PeftMatrix, str]] = {}
        for one in peft_matrices(model, adapter, where=str(folder)):
            for parameter in one.matrix.parameters:
                self._parts[parameter.name] = (one, parameter.kind)
        self._check_names()
        self._check_shapes()

    @property
    def base_digest(self) -> str | None:
        """The digest of the base that the adapters were trained on, where the writer recorded it."""
        return (self._file.metadata() or {}).get(BASE_DIGEST)

    def read_slice(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """A slice of lora_A, lora_B or magnitude of one of our adapters."""
        one, own = self._parts[name]
        keys = [self._disk_name[key] for key in one.keys(own)]
        if one.matrix.is_expert:
            first, *rest = index
            value = torch.stack([self._file.get_slice(key)[tuple(rest)] for key in keys[first]])
        else:
            value = self._file.get_slice(keys[0])[index]
        return value.float() * self._scale_ratio(one) if own == LORA_B else value

    def _scale_ratio(self, one: PeftMatrix) -> float:
        """The scale of a module there over the scale of its adapter here."""
        config, module = self._config, one.modules[0]
        alpha = _by_pattern(config.get("alpha_pattern") or {}, module, config["lora_alpha"])
        rank = one.matrix.rank
        return alpha / (rank**0.5 if config.get("use_rslora") else rank) / one.matrix.scale

    def _read_config(self) -> dict[str, Any]:
        path = self.folder / CONFIG_FILE
        try:
            config = read_json_file(path, max_bytes=_MAX_CONFIG_BYTES)
            if not isinstance(config, dict) or not isinstance(config["lora_alpha"], int | float):
                raise ValueError("it has no lora_alpha")
        except (OSError, ValueError, KeyError) as error:
            hint = "save the adapter again"
            raise CheckpointError(f"damaged: {error}", where=str(path), hint=hint) from None
        for key, usual in (("peft_type", "LORA"), ("bias", "none"), ("modules_to_save", None)):
            if config.get(key, usual) not in (usual, [] if usual is None else usual):
                hint = "merge it into its base with peft, and start from the merged model"
                raise CheckpointError(f"{key} is {config[key]!r}", where=str(path), hint=hint)
        if bool(config.get("use_dora")) != (self._adapter.kind == "dora"):
            there = "dora" if config.get("use_dora") else "lora"
            hint = f"use adapter.kind={there}"
            raise CheckpointError(f"the adapter is of kind {there}", where=str(path), hint=hint)
        return config

    def _open(self) -> Any:
        path = self.folder / WEIGHTS_FILE
        try:
            regular_file(path).close()
            return safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else error
            hint = "save the adapter as safetensors"
            raise CheckpointError(f"cannot read the file: {why}", where=str(path), hint=hint) from None

    def _check_names(self) -> None:
        wanted = {key for one, own in self._parts.values() for key in one.keys(own)}
        missing, unexpected = sorted(wanted - self._disk_name.keys()), sorted(self._disk_name.keys() - wanted)
        for word, names in (("has no", missing), ("has also", unexpected)):
            if names:
                raise CheckpointError(
                    f"the adapter {word} {names[0]}, and so on for {len(names)} tensors",
                    where=str(self.folder),
                    hint="set adapter.targets to its matrices (target_modules in its adapter_config.json) "
                    "and checkpoint.start_from to its base",
                )

    def _check_shapes(self) -> None:
        for one, own in self._parts.values():
            shape = next(each.shape for each in one.matrix.parameters if each.kind == own)
            expected = list(shape[1:] if one.matrix.is_expert else shape)
            for key in one.keys(own):
                found = list(self._file.get_slice(self._disk_name[key]).get_shape())
                if found != expected:
                    raise CheckpointError(
                        f"{key} has shape {_text(found)}, and {_text(expected)} in this run",
                        where=str(self.folder),
                        hint="use the adapter's rank in adapter.rank, and its base in checkpoint.start_from",
                    )


def _text(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def _by_pattern(patterns: dict[str, Any], module: str, usual: float) -> float:
    """peft's rule: the first pattern that the end of a module's name matches."""
    found = (value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module))
    return next(found, usual)
