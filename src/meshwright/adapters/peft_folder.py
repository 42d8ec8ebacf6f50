"""A peft folder compared with a run: names, shapes, dtypes and ranks of its tensors, without torch.

`check` opens it to say what `train` would refuse; `PeftReader` opens it before it reads tensors.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import numpy as np

from meshwright.adapters.expert_stack import FIRST_VERSION, ExpertStack, shape_hint
from meshwright.adapters.peft_config import CONFIG_FILE, MERGE, ends_with, read_peft_config, require_same_kind
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
from meshwright.errors import CheckpointError, read_trouble
from meshwright.spec import AdapterSpec, ModelSpec
from meshwright.spec.adapter import EMBEDDING, LORA_A, LORA_B
from meshwright.spec.huggingface.names import sources
from meshwright.spec.huggingface.tensor_file import TensorFile, TensorRange
from meshwright.spec.parameters import parameters

WEIGHTS_FILE = "adapter_model.safetensors"
BASE_DIGEST = "meshwright_base"
"""Key in the metadata of the weights' file: the digest of the base that the adapters were trained on."""
RANK_DIMS = {LORA_A: -2, LORA_B: -1}
"""The dim of a factor that is the rank."""
_PICKLE_FILE = "adapter_model.bin"
_FROZEN_TABLE = re.compile(r"\.(embed_tokens|wte|lm_head)\.(token_adapter\.)?base_layer\.weight$")
_NAMED_FACTOR = re.compile(r"\.(lora_[AB])\.[^.]+\.weight$")
_STACKED_EXPERTS = re.compile(r"\.experts\.(base_layer\.)?lora_[AB]\.weight$")
_ROUTER = re.compile(r"\.gate\.lora_[AB]\.weight$")
_HEAD, _FLOATING = "lm_head", ("F", "BF")
_TRAIN_ONLY = "name it in train_only: embedding.tokens.weight, head.weight, *norm* and so on"
_OTHER_SHAPE = "use the adapter's rank in adapter.rank, and its base in checkpoint.start_from"
_SAVE_AGAIN = "save the adapter again, as safetensors"


def is_peft_folder(folder: Path) -> bool:
    """Whether this folder has adapters in peft's format, or a part of them."""
    return any((folder / name).is_file() for name in (CONFIG_FILE, WEIGHTS_FILE))


class PeftFolder:
    """The tensors of a folder for the adapters of a run, and for what is trained beside them."""

    def __init__(
        self, folder: Path, model: ModelSpec, adapter: AdapterSpec, *, trained: Iterable[str] = ()
    ) -> None:
        """Check that the folder has exactly these adapters; CheckpointError where it does not.

        `trained` names parameters that the run trains in full beside adapters; the folder has all or none of
        them.
        """
        self.folder, self._adapter = folder, adapter
        self.config = read_peft_config(folder)
        require_same_kind(self.config, adapter, folder)
        self._ranges = self._open()
        self.disk_name = self._disk_names()
        self.parts: dict[str, tuple[PeftMatrix, str]] = {}
        has_stacks = any(_STACKED_EXPERTS.search(key) for key in self.disk_name)
        for one in peft_matrices(model, adapter, where=str(folder), has_stacks=has_stacks):
            for parameter in one.matrix.parameters:
                self.parts[parameter.name] = (one, parameter.kind)
        self.rows: dict[str, PeftRows] = {
            one.change: one for one in peft_rows(model, adapter) if self.token_ids(one)
        }
        self._shapes = {one.name: one.shape for one in parameters(model)}
        self.full = self._full_parameters(model, tuple(trained))
        self._check_tokens()
        self._check_names()
        self._check_shapes()
        self._check_ranks()

    def token_ids(self, rows: PeftRows) -> list[int]:
        """The ids of a table's trained rows there; a table without ids starts as that of the base."""
        return self.config.token_ids(rows.module, is_embedding=rows.table == EMBEDDING)

    def scale_ratio(self, one: PeftMatrix) -> float:
        """The scale of a module there over the scale of its adapter here."""
        return self.config.scale(one.modules[0], self.rank_there(one)) / one.matrix.scale

    def rank_there(self, one: PeftMatrix) -> int:
        """The rank of a module there: above that of the run where a writer padded all to the largest one."""
        shape = self._range(one.keys(LORA_A)[0]).shape or (0,)
        rank = shape[-1 if one.is_transposed else 0]
        return rank if one.stack is None else rank // one.stack.num_experts

    @property
    def base_digest(self) -> str | None:
        """The digest of the base that the adapters were trained on, where the writer recorded it."""
        return self._metadata.get(BASE_DIGEST)

    def _open(self) -> dict[str, TensorRange]:
        """Where each tensor is in the file, by its name there."""
        self._path = self.folder / WEIGHTS_FILE
        if not self._path.exists() and (self.folder / _PICKLE_FILE).exists():
            raise unreadable(self._path, f"the folder has {_PICKLE_FILE} in its place")
        with damage_reported(self._path):
            file = TensorFile(self._path)
            self._metadata = file.metadata
            return {name: file.tensor(name) for name in file.names()}

    def _range(self, key: str) -> TensorRange:
        return self._ranges[self.disk_name[key]]

    def _refuse(self, fact: str, hint: str) -> NoReturn:
        raise CheckpointError(fact, where=str(self.folder), hint=hint)

    def _disk_names(self) -> dict[str, str]:
        """Key of peft -> key in the file; a state dict of a model in memory names the adapter in its keys."""
        found: dict[str, str] = {}
        for key in self._ranges:
            usual = _NAMED_FACTOR.sub(r".\1.weight", key).replace(".default.", ".")
            if usual in found:
                self._refuse(f"the file has {found[usual]} and {key}: several adapters", "save one of them")
            found[usual] = key
        return found

    def _full_parameters(self, model: ModelSpec, trained: tuple[str, ...]) -> dict[str, str]:
        """Our name -> key there, of the modules that are trained in full."""
        saved = self.config.modules
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
        apart = [one for one in self.config.modules if any(ends_with(table, one) for table in tables)]
        if apart and not self.config.ties_weights:
            fact = f"{apart[0]} was trained apart from the table that it is tied to in this run"
            self._refuse(f"{fact} (modules_to_save without ensure_weight_tying)", MERGE)

    def _check_tokens(self) -> None:
        """Refuse rows of other tokens than the run trains."""
        wanted = sorted(self._adapter.tokens)
        for ids in list(self.config.tokens.values()) or [[]]:
            if sorted(ids) != wanted:
                fact = f"the folder has trained rows of the tokens {sorted(ids)}, and this run of {wanted}"
                self._refuse(fact, "set adapter.tokens to the ids there")

    def _check_names(self) -> None:
        wanted = {key for one, own in self.parts.values() for key in one.keys(own)}
        wanted |= {*self.full.values(), *(one.key for one in self.rows.values())}
        # peft saves the frozen table beside an adapter on embedding or head, and beside rows of new tokens.
        copies = {TIED_HEAD_KEY} - set(self.full.values()) if self.full else set()
        found = {key for key in self.disk_name if not _FROZEN_TABLE.search(key)} - copies
        missing, unexpected = sorted(wanted - found), sorted(found - wanted)
        for word, names in (("has no", missing), ("has also", unexpected)):
            if names:
                others = f", and {len(names) - 1} more tensors like it" if names[1:] else ""
                self._refuse(f"the adapter {word} {names[0]}{others}", _hint_for_names(names[0], found))

    def _check_shapes(self) -> None:
        for one, own in self.parts.values():
            if one.stack is not None:
                self._check_stack(one, one.stack, own)
                continue
            shape = next(each.shape for each in one.matrix.parameters if each.kind == own)
            expected = list(shape[1:] if one.matrix.is_expert else shape)
            if own in RANK_DIMS and self._is_padded(one):
                expected[RANK_DIMS[own]] = self.rank_there(one)
            for key in one.keys(own):
                self._check_shape(key, expected[::-1] if one.is_transposed else expected)
        for name, key in self.full.items():
            self._check_shape(key, list(self._shapes[name]))
        for one in self.rows.values():
            self._check_shape(one.key, [len(self._adapter.tokens), self._shapes[one.table][1]])

    def _check_stack(self, one: PeftMatrix, stack: ExpertStack, own: str) -> None:
        """Refuse factors of stacked experts of another shape, or whose shape may have two meanings."""
        key = one.keys(own)[0]
        rank = self.rank_there(one) if self._is_padded(one) else one.matrix.rank
        hint = shape_hint(stack, own, list(self._range(key).shape), self.rank_there(one))
        self._check_shape(key, stack.shape(own, rank), hint)
        if stack.num_inputs == stack.num_outputs and self.config.version < FIRST_VERSION:
            fact = f"{key} has as many inputs as outputs, which peft before 0.19.1 took for each other"
            self._refuse(f"{fact}, and the config names no newer one in peft_version", MERGE)

    def _is_padded(self, one: PeftMatrix) -> bool:
        """Whether the ranks there beyond those of the run add nothing: their columns of B are zero."""
        if self.rank_there(one) <= one.matrix.rank:
            return False
        rows, rank = slice(None), one.matrix.rank
        if one.stack is not None:
            rows, rank = one.stack.own_outputs, rank * one.stack.num_experts
        factors = [self._bytes_of(key, is_transposed=one.is_transposed) for key in one.keys(LORA_B)]
        return all(b is not None and not b[rows, rank:].any() for b in factors)

    def _bytes_of(
        self, key: str, *, is_transposed: bool
    ) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]] | None":
        """A factor B as [outputs, rank, bytes of an element], memory-mapped; None for no matrix."""
        _, shape, begin, end = self._range(key)
        if len(shape) != 2 or begin == end:
            return None
        item_bytes = (end - begin) // (shape[0] * shape[1])
        found = np.memmap(self._path, np.uint8, mode="r", offset=begin, shape=(*shape, item_bytes))
        return found.swapaxes(0, 1) if is_transposed else found

    def _check_ranks(self) -> None:
        """Refuse a config whose ranks are not those of the tensors: the scale is alpha / rank."""
        for one, _ in self.parts.values():
            there, in_file = self.config.rank_of(one.modules[0]), self.rank_there(one)
            if there != in_file:
                place = str(self.folder / CONFIG_FILE)
                fact = f"damaged: r is {there:g} for {one.modules[0]}, whose tensors have {in_file}"
                raise CheckpointError(fact, where=place, hint="save the adapter again")

    def _check_shape(self, key: str, expected: list[int], hint: str = _OTHER_SHAPE) -> None:
        dtype, shape, *_ = self._range(key)
        if not dtype.startswith(_FLOATING):
            self._refuse(f"{key} has dtype {dtype}, no floating one", "save the adapter again")
        if list(shape) != expected:
            self._refuse(f"{key} has shape {_text(shape)}, and {_text(expected)} in this run", hint)


@contextmanager
def damage_reported(path: Path, *, hint: str = _SAVE_AGAIN) -> Iterator[None]:
    """Inside, whatever an absent or damaged file raises is an error of that file."""
    try:
        yield
    except PermissionError as error:
        raise unreadable(path, read_trouble(error), "check the permissions of the file") from None
    except OSError as error:
        raise unreadable(path, read_trouble(error), hint) from None
    except (LookupError, ValueError, TypeError, RecursionError) as error:
        why = f"its header has no {error}" if isinstance(error, KeyError) else error
        raise unreadable(path, why, hint) from None


def unreadable(path: Path, why: object, hint: str = _SAVE_AGAIN) -> CheckpointError:
    """The error of a file of weights that cannot be read."""
    return CheckpointError(f"cannot read the file: {why}", where=str(path), hint=hint)


def _hint_for_names(name: str, found: Iterable[str]) -> str:
    """What to do about a tensor that only the folder, or only the run has."""
    if not any(key.startswith(PREFIX) for key in found):
        return f"peft's names begin with {PREFIX!r}: rename the tensors of the folder"
    if _ROUTER.search(name):
        return f"routers have no adapters here: {MERGE}"
    if _STACKED_EXPERTS.search(name):
        return (
            "name in adapter.targets what target_parameters has in its adapter_config.json: gate_up_proj is "
            "gate and up of the routed experts, and down_proj is down"
        )
    if ".lora_" not in name and not name.endswith(ROWS_SUFFIX):
        return _TRAIN_ONLY
    return (
        "set adapter.targets to its matrices (target_modules in its adapter_config.json) and "
        "checkpoint.start_from to its base"
    )


def _text(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))
