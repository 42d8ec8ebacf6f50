"""Reads adapters from a peft folder; a rank reads only the slices of its shards."""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from meshwright.adapters.peft_config import CONFIG_FILE, ends_with, read_peft_config, require_same_kind
from meshwright.adapters.peft_names import (
    PREFIX,
    ROWS_SUFFIX,
    TIED_HEAD_KEY,
    PeftMatrix,
    PeftRows,
    peft_matrices,
    peft_modules,
    peft_rows,
)
from meshwright.adapters.peft_write import BASE_DIGEST, WEIGHTS_FILE
from meshwright.errors import CheckpointError
from meshwright.files import regular_file
from meshwright.spec import AdapterSpec, ModelSpec
from meshwright.spec.adapter import EMBEDDING, LORA_A, LORA_B
from meshwright.spec.huggingface.names import sources
from meshwright.spec.parameters import parameters

_PICKLE_FILE = "adapter_model.bin"
_FROZEN_TABLE = re.compile(r"\.(embed_tokens|wte|lm_head)\.(token_adapter\.)?base_layer\.weight$")
_NAMED_FACTOR = re.compile(r"\.(lora_[AB])\.[^.]+\.weight$")
_FUSED_EXPERTS = re.compile(r"\.experts\.(base_layer\.)?lora_[AB]\.weight$")
_HEAD, _FLOATING = "lm_head", ("F", "BF")
_RANK_DIMS = {LORA_A: -2, LORA_B: -1}
_TRAIN_ONLY = "name it in train_only: embedding.tokens.weight, head.weight, *norm* and so on"
_MERGE = "merge it into its base with peft, and start from the merged model"


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
        self._config = read_peft_config(folder)
        require_same_kind(self._config, adapter, folder)
        self._file = self._open()
        self._disk_name = self._disk_names()
        self._parts: dict[str, tuple[PeftMatrix, str]] = {}
        for one in peft_matrices(model, adapter, where=str(folder)):
            for parameter in one.matrix.parameters:
                self._parts[parameter.name] = (one, parameter.kind)
        self._rows: dict[str, PeftRows] = {
            one.change: one for one in peft_rows(model, adapter) if self._token_ids(one)
        }
        self._shapes = {one.name: one.shape for one in parameters(model)}
        self._full = self._full_parameters(model, tuple(trained))
        self._check_tokens()
        self._check_names()
        self._check_shapes()
        self._check_ranks()

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
        index = _within_rank(index, own, one.matrix.rank)
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
        ids = self._token_ids(rows)
        in_order = torch.tensor([ids.index(one) for one in sorted(ids)])
        return there[in_order] - self._read_base_rows(rows.table, sorted(ids)).float()

    def _token_ids(self, rows: PeftRows) -> list[int]:
        """The ids of a table's trained rows there; a table without ids starts as that of the base."""
        return self._config.token_ids(rows.module, is_embedding=rows.table == EMBEDDING)

    def _full_parameters(self, model: ModelSpec, trained: tuple[str, ...]) -> dict[str, str]:
        """Our name -> key there, of the modules that are trained in full."""
        saved = self._config.modules
        if not saved:
            return {}
        modules = peft_modules(model, self._adapter, trained, where=str(self.folder))
        names = [one.name for one in modules]
        if model.tied_head:
            self._check_tied(model)
            names += [_HEAD] if EMBEDDING in trained else []
        missing = [one for one in saved if not any(ends_with(name, one) for name in names)]
        if missing:
            fact = f"the folder has {missing[0]} in modules_to_save, and this run does not train it in full"
            self._refuse(fact, _TRAIN_ONLY)
        pairs = [pair for one in modules for pair in one.parameters.items()]
        return {name: key for key, name in pairs if key != TIED_HEAD_KEY or not model.tied_head}

    def _check_tied(self, model: ModelSpec) -> None:
        """Refuse an embedding or head that was trained apart from the other one, where a run ties them."""
        tables = (sources(model)[EMBEDDING].names[0].removesuffix(".weight"), _HEAD)
        apart = [one for one in self._config.modules if any(ends_with(table, one) for table in tables)]
        if apart and not self._config.ties_weights:
            fact = f"{apart[0]} was trained apart from the table that it is tied to in this run"
            self._refuse(f"{fact} (modules_to_save without ensure_weight_tying)", _MERGE)

    def _check_tokens(self) -> None:
        """Refuse rows of other tokens than the run trains."""
        wanted = sorted(self._adapter.tokens)
        for ids in list(self._config.tokens.values()) or [[]]:
            if sorted(ids) != wanted:
                fact = f"the folder has trained rows of the tokens {sorted(ids)}, and this run of {wanted}"
                self._refuse(fact, "set adapter.tokens to the ids there")

    def _scale_ratio(self, one: PeftMatrix) -> float:
        """The scale of a module there over the scale of its adapter here."""
        return self._config.scale(one.modules[0], self._rank_there(one)) / one.matrix.scale

    def _rank_there(self, one: PeftMatrix) -> int:
        """The rank of a module there: above that of the run where a writer padded all to the largest one."""
        shape = self._file.get_slice(self._disk_name[one.keys(LORA_A)[0]]).get_shape()
        return (shape or [0])[-1 if one.is_transposed else 0]

    def _refuse(self, fact: str, hint: str) -> NoReturn:
        raise CheckpointError(fact, where=str(self.folder), hint=hint)

    def _open(self) -> Any:
        path = self.folder / WEIGHTS_FILE
        try:
            regular_file(path).close()
            return safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else error
            if not path.exists() and (self.folder / _PICKLE_FILE).exists():
                why = f"the folder has {_PICKLE_FILE} in its place"
            hint = "save the adapter as safetensors"
            raise CheckpointError(f"cannot read the file: {why}", where=str(path), hint=hint) from None

    def _disk_names(self) -> dict[str, str]:
        """Key of peft -> key in the file; a state dict of a model in memory names the adapter in its keys."""
        found: dict[str, str] = {}
        for key in self._file.keys():  # noqa: SIM118
            usual = _NAMED_FACTOR.sub(r".\1.weight", key).replace(".default.", ".")
            if usual in found:
                self._refuse(f"the file has {found[usual]} and {key}: several adapters", "save one of them")
            found[usual] = key
        return found

    def _check_names(self) -> None:
        wanted = {key for one, own in self._parts.values() for key in one.keys(own)}
        wanted |= {*self._full.values(), *(one.key for one in self._rows.values())}
        # peft saves the frozen table beside an adapter on embedding or head, and beside rows of new tokens.
        copies = {TIED_HEAD_KEY} - set(self._full.values()) if self._full else set()
        found = {key for key in self._disk_name if not _FROZEN_TABLE.search(key)} - copies
        missing, unexpected = sorted(wanted - found), sorted(found - wanted)
        for word, names in (("has no", missing), ("has also", unexpected)):
            if names:
                others = f", and {len(names) - 1} more tensors like it" if names[1:] else ""
                self._refuse(f"the adapter {word} {names[0]}{others}", _hint_for_names(names[0], found))

    def _check_shapes(self) -> None:
        for one, own in self._parts.values():
            shape = next(each.shape for each in one.matrix.parameters if each.kind == own)
            expected = list(shape[1:] if one.matrix.is_expert else shape)
            if own in _RANK_DIMS and self._is_padded(one):
                expected[_RANK_DIMS[own]] = self._rank_there(one)
            for key in one.keys(own):
                self._check_shape(key, expected[::-1] if one.is_transposed else expected)
        for name, key in self._full.items():
            self._check_shape(key, list(self._shapes[name]))
        for one in self._rows.values():
            self._check_shape(one.key, [len(self._adapter.tokens), self._shapes[one.table][1]])

    def _is_padded(self, one: PeftMatrix) -> bool:
        """Whether the ranks there beyond those of the run add nothing: their columns of B are zero."""
        if self._rank_there(one) <= one.matrix.rank:
            return False
        keys = [self._disk_name[key] for key in one.keys(LORA_B)]
        factors = [self._file.get_tensor(key) for key in keys]
        return all(
            b.dim() == 2 and not (b.mT if one.is_transposed else b)[:, one.matrix.rank :].any()
            for b in factors
        )

    def _check_ranks(self) -> None:
        """Refuse a config whose ranks are not those of the tensors: the scale is alpha / rank."""
        for one, _ in self._parts.values():
            there, in_file = self._config.rank_of(one.modules[0]), self._rank_there(one)
            if there != in_file:
                place = str(self.folder / CONFIG_FILE)
                fact = f"damaged: r is {there:g} for {one.modules[0]}, whose tensors have {in_file}"
                raise CheckpointError(fact, where=place, hint="save the adapter again")

    def _check_shape(self, key: str, expected: list[int]) -> None:
        there = self._file.get_slice(self._disk_name[key])
        found, dtype = list(there.get_shape()), there.get_dtype()
        if not dtype.startswith(_FLOATING):
            self._refuse(f"{key} has dtype {dtype}, no floating one", "save the adapter again")
        if found != expected:
            hint = "use the adapter's rank in adapter.rank, and its base in checkpoint.start_from"
            self._refuse(f"{key} has shape {_text(found)}, and {_text(expected)} in this run", hint)


def _within_rank(index: tuple[slice, ...], own: str, rank: int) -> tuple[slice, ...]:
    """The index of a factor, without the ranks that are padding there."""
    if own not in _RANK_DIMS:
        return index
    bounded, dim = list(index), _RANK_DIMS[own]
    bounded[dim] = slice(*bounded[dim].indices(rank))
    return tuple(bounded)


def _hint_for_names(name: str, found: Iterable[str]) -> str:
    """What to do about a tensor that only the folder, or only the run has."""
    if not any(key.startswith(PREFIX) for key in found):
        return f"peft's names begin with {PREFIX!r}: rename the tensors of the folder"
    if any(_FUSED_EXPERTS.search(key) for key in found):
        return f"routed experts have one A and B each here, not target_parameters: {_MERGE}"
    if ".lora_" not in name and not name.endswith(ROWS_SUFFIX):
        return _TRAIN_ONLY
    return (
        "set adapter.targets to its matrices (target_modules in its adapter_config.json) and "
        "checkpoint.start_from to its base"
    )


def _text(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))
