"""Reads adapters from a peft folder; a rank reads only the slices of its shards."""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from meshwright.adapters.peft_names import (
    TIED_HEAD_KEY,
    PeftMatrix,
    PeftRows,
    peft_matrices,
    peft_modules,
    peft_rows,
)
from meshwright.adapters.peft_write import BASE_DIGEST, CONFIG_FILE, WEIGHTS_FILE
from meshwright.errors import CheckpointError
from meshwright.files import MIB, read_json_file, regular_file
from meshwright.spec import AdapterSpec, ModelSpec
from meshwright.spec.adapter import LORA_B
from meshwright.spec.parameters import parameters

_MAX_CONFIG_BYTES = 16 * MIB
_FROZEN_TABLES = (".embed_tokens.base_layer.weight", ".wte.base_layer.weight", ".lm_head.base_layer.weight")


def is_peft_folder(folder: Path) -> bool:
    """Whether this folder has adapters in peft's format."""
    return (folder / CONFIG_FILE).is_file()


ReadBaseRows = Callable[[str, list[int]], Tensor]
"""Reads rows of a table of the base, by our name."""


class PeftReader:
    """The adapters of a folder under our names, at the scales of a run's own adapters."""

    def __init__(
        self,
        folder: Path,
        model: ModelSpec,
        adapter: AdapterSpec,
        *,
        trained: Iterable[str] = (),
        read_base_rows: ReadBaseRows | None = None,
    ) -> None:
        """Open the folder and check that it has exactly these adapters.

        `trained` names parameters that the run trains in full beside adapters; the folder has all or none of
        them. `read_base_rows` is needed for trained rows of single tokens.
        """
        self.folder, self._adapter, self._read_base_rows = folder, adapter, read_base_rows
        self._config = self._read_config()
        self._file = self._open()
        # A file that peft wrote from memory may have the adapter's name in its keys.
        self._disk_name = {key.replace(".default.", "."): key for key in self._file.keys()}  # noqa: SIM118
        self._parts: dict[str, tuple[PeftMatrix, str]] = {}
        for one in peft_matrices(model, adapter, where=str(folder)):
            for parameter in one.matrix.parameters:
                self._parts[parameter.name] = (one, parameter.kind)
        self._rows: dict[str, PeftRows] = {one.change: one for one in peft_rows(model, adapter)}
        self._shapes = {one.name: one.shape for one in parameters(model)}
        self._full = self._full_parameters(model, tuple(trained))
        self._check_tokens()
        self._check_names()
        self._check_shapes()

    @property
    def base_digest(self) -> str | None:
        """The digest of the base that the adapters were trained on, where the writer recorded it."""
        return (self._file.metadata() or {}).get(BASE_DIGEST)

    def names(self) -> list[str]:
        """Our names of everything in the folder."""
        return [*self._parts, *self._rows, *self._full]

    def read_slice(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """A slice of a parameter of one of our adapters, or of one that is trained in full."""
        if name in self._full:
            return self._file.get_slice(self._disk_name[self._full[name]])[index]
        if name in self._rows:
            return self._row_changes(self._rows[name])[index]
        one, own = self._parts[name]
        keys = [self._disk_name[key] for key in one.keys(own)]
        if one.is_transposed:
            value = self._file.get_slice(keys[0])[index[::-1]].mT
        elif one.matrix.is_expert:
            first, *rest = index
            value = torch.stack([self._file.get_slice(key)[tuple(rest)] for key in keys[first]])
        else:
            value = self._file.get_slice(keys[0])[index]
        return value.float() * self._scale_ratio(one) if own == LORA_B else value

    def _row_changes(self, rows: PeftRows) -> Tensor:
        """The rows of single tokens there minus those of the base."""
        assert self._read_base_rows is not None
        there = self._file.get_tensor(self._disk_name[rows.key]).float()
        ids = self._config["trainable_token_indices"]
        ids = ids if isinstance(ids, list) else next(iter(ids.values()))
        in_order = torch.tensor([ids.index(one) for one in sorted(ids)])
        return there[in_order] - self._read_base_rows(rows.table, sorted(ids)).float()

    def _full_parameters(self, model: ModelSpec, trained: tuple[str, ...]) -> dict[str, str]:
        """Our name -> key there, of the modules that are trained in full."""
        modules = peft_modules(model, self._adapter, trained, where=str(self.folder))
        saved = self._config.get("modules_to_save") or []
        missing = [one for one in saved if not any(_ends_with(each.name, one) for each in modules)]
        if missing:
            raise CheckpointError(
                f"the folder has {missing[0]} in modules_to_save, and this run does not train it in full",
                where=str(self.folder),
                hint="name it in train_only: embedding.tokens.weight, head.weight, *norm* and so on",
            )
        pairs = [pair for one in modules for pair in one.parameters.items() if saved]
        return {name: key for key, name in pairs if key != TIED_HEAD_KEY or not model.tied_head}

    def _check_tokens(self) -> None:
        """Refuse rows of other tokens than the run trains."""
        there = self._config.get("trainable_token_indices") or []
        lists = list(there.values()) if isinstance(there, dict) else [there] if there else []
        wanted = sorted(self._adapter.tokens)
        for ids in lists or [[]]:
            if sorted(ids) != wanted:
                raise CheckpointError(
                    f"the folder has trained rows of the tokens {sorted(ids)}, and this run of {wanted}",
                    where=str(self.folder),
                    hint="set adapter.tokens to the ids there",
                )

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
        for key, usual in (("peft_type", "LORA"), ("bias", "none")):
            if config.get(key, usual) != usual:
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
        wanted |= {*self._full.values(), *(one.key for one in self._rows.values())}
        # peft saves the frozen table beside an adapter on embedding or head.
        copies = {TIED_HEAD_KEY} - set(self._full.values()) if self._full else set()
        found = {key for key in self._disk_name if not key.endswith(_FROZEN_TABLES)} - copies
        missing, unexpected = sorted(wanted - found), sorted(found - wanted)
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
                self._check_shape(key, expected[::-1] if one.is_transposed else expected)
        for name, key in self._full.items():
            self._check_shape(key, list(self._shapes[name]))
        for one in self._rows.values():
            self._check_shape(one.key, [len(self._adapter.tokens), self._shapes[one.table][1]])

    def _check_shape(self, key: str, expected: list[int]) -> None:
        found = list(self._file.get_slice(self._disk_name[key]).get_shape())
        if found != expected:
            raise CheckpointError(
                f"{key} has shape {_text(found)}, and {_text(expected)} in this run",
                where=str(self.folder),
                hint="use the adapter's rank in adapter.rank, and its base in checkpoint.start_from",
            )


def _ends_with(module: str, name: str) -> bool:
    """peft's rule for modules_to_save: a name is the end of a module's name."""
    return module == name or module.endswith(f".{name}")


def _text(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def _by_pattern(patterns: dict[str, Any], module: str, usual: float) -> float:
    """peft's rule: the first pattern that the end of a module's name matches."""
    found = (value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module))
    return next(found, usual)
