"""Weights to and from Hugging Face folders: `config.json` plus safetensors, one file or several."""

import json
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from meshwright.errors import CheckpointError
from meshwright.files import MIB, new_folder_beside, read_json_file, regular_file, share_file
from meshwright.spec import ModelSpec
from meshwright.spec.huggingface import model_at, to_config
from meshwright.spec.huggingface.names import Source, sources, state_shapes

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
DEFAULT_SHARD_BYTES = 5 * 10**9
# Tensors that older writers saved although they follow from the config.
_DERIVED = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
_FLOATING = ("F64", "F32", "F16", "BF16")
_LAYER = re.compile(r"model\.layers\.([0-9]{1,6})\.")
_MAX_INDEX_BYTES = 64 * MIB
_OTHER_MODEL = "the weights do not belong to this model (config.json)"
_AGAIN = "download or save the folder again"


class HuggingFaceReader:
    """The tensors of a folder under our names, read one at a time from memory-mapped files."""

    def __init__(self, folder: str | Path, model: ModelSpec | None = None) -> None:
        """Open the folder and check that it holds this model (None: the one of its config.json)."""
        self.folder = Path(folder)
        self.model = model_at(self.folder) if model is None else model
        self._file_of = self._with_prefix(_file_of_tensor(self.folder))
        self._check_count()
        self.sources = sources(self.model)
        self.shapes = state_shapes(self.model)
        self._open: dict[str, Any] = {}
        self._check_names()
        self._check_tensors()

    def names(self) -> list[str]:
        """Names of all parameters and saved buffers, in the order of the model."""
        return list(self.sources)

    def read(self, name: str) -> Tensor:
        """The full tensor, in its dtype on disk."""
        return self.read_slice(name, ())

    def read_slice(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """A slice of the tensor (contiguous along each dim); only that slice is read."""
        source, shape = self.sources[name], self.shapes[name]
        bounds = [_bounds(part, size) for part, size in zip(_padded(index, len(shape)), shape, strict=True)]
        if source.stacked:
            first, last = bounds[0]
            return torch.stack(
                [self._read(each, source, shape[1:], bounds[1:]) for each in source.names[first:last]]
            )
        return self._read(source.names[0], source, shape, bounds)

    def _read(
        self, hf_name: str, source: Source, shape: tuple[int, ...], bounds: list[tuple[int, int]]
    ) -> Tensor:
        """A slice of one tensor on disk; the bounds are those of our layout."""
        handle = self._handle(hf_name).get_slice(self._disk_name(hf_name))
        if source.third is not None:
            offset = source.third * shape[0]
            bounds = [(bounds[0][0] + offset, bounds[0][1] + offset), *bounds[1:]]
        if source.transposed:
            bounds = bounds[::-1]
        tensor = handle[tuple(slice(first, last) for first, last in bounds)]
        return tensor.t().contiguous() if source.transposed else tensor

    def _handle(self, hf_name: str) -> Any:
        return self._handle_of_file(self._file_of[hf_name])

    def _handle_of_file(self, file: str) -> Any:
        if file not in self._open:
            path = self.folder / file
            try:
                regular_file(path).close()
                self._open[file] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                why = error.strerror if isinstance(error, OSError) and error.strerror else error
                raise CheckpointError(f"cannot read the file: {why}", where=str(path), hint=_AGAIN) from None
        return self._open[file]

    def _with_prefix(self, files: dict[str, str]) -> dict[str, str]:
        """File by tensor name; adds the prefix `transformer.`, which the first GPT-2 checkpoints lack."""
        self._prefix = ""
        if "wte.weight" in files:
            self._prefix = "transformer."
        return {self._prefix + name: file for name, file in files.items()}

    def _disk_name(self, hf_name: str) -> str:
        return hf_name.removeprefix(self._prefix)

    def _check_count(self) -> None:
        """Refuse a config with more layers than there are tensors, before names are made for each of them."""
        if self.model.num_layers > len(self._file_of):
            raise CheckpointError(
                f"the model has {self.model.num_layers} layers, and the folder only "
                f"{len(self._file_of)} tensors",
                where=str(self.folder),
                hint=_OTHER_MODEL,
            )

    def _check_names(self) -> None:
        wanted = {name for source in self.sources.values() for name in source.names}
        missing = sorted(wanted - self._file_of.keys())
        if missing:
            raise CheckpointError(_describe("missing", missing), where=str(self.folder), hint=_OTHER_MODEL)
        unexpected = sorted(name for name in self._file_of.keys() - wanted if not self._may_be_ignored(name))
        if unexpected:
            quantised = any("scale" in name for name in unexpected)
            hint = (
                "the weights are quantised: convert them to bf16 first" if quantised else "check config.json"
            )
            raise CheckpointError(_describe("unexpected", unexpected), where=str(self.folder), hint=hint)

    def _check_tensors(self) -> None:
        """Refuse a tensor that its file does not have, or that has another shape or no floating dtype."""
        present = {file: set(self._handle_of_file(file).keys()) for file in set(self._file_of.values())}
        for name, source in self.sources.items():
            expected = _shape_on_disk(source, self.shapes[name])
            for hf_name in source.names:
                if self._disk_name(hf_name) not in present[self._file_of[hf_name]]:
                    raise CheckpointError(
                        f"{self._file_of[hf_name]} has no tensor {hf_name}, which the index names",
                        where=str(self.folder),
                        hint=_AGAIN,
                    )
                self._check_tensor(hf_name, expected)

    def _check_tensor(self, hf_name: str, expected: tuple[int, ...]) -> None:
        found = self._handle(hf_name).get_slice(self._disk_name(hf_name))
        if tuple(found.get_shape()) != expected:
            raise CheckpointError(
                f"{hf_name} has shape {tuple(found.get_shape())}, the model has {expected}",
                where=str(self.folder),
                hint=_OTHER_MODEL,
            )
        if found.get_dtype() not in _FLOATING:
            raise CheckpointError(
                f"{hf_name} has dtype {found.get_dtype()}; weights are one of {', '.join(_FLOATING)}",
                where=str(self.folder),
                hint="the weights are quantised: convert them to bf16 first",
            )

    def _may_be_ignored(self, name: str) -> bool:
        is_second_copy = name == "lm_head.weight" and self.model.tied_head
        # Multi-token-prediction modules have layer numbers after the last layer of the model.
        layer = _LAYER.match(name)
        is_extra_layer = layer is not None and int(layer[1]) >= self.model.num_layers
        return is_second_copy or is_extra_layer or name.endswith(_DERIVED)


def save_folder(
    state: Mapping[str, Tensor],
    model: ModelSpec,
    folder: str | Path,
    *,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    dtype: torch.dtype | None = None,
    files: Mapping[str, bytes] | None = None,
) -> None:
    """Write `config.json` and the weights, cast to `dtype` if one is given; called by one rank.

    `state` maps our names to full tensors and is read one tensor at a time. `files` are written beside the
    weights; a `config.json` among them takes the place of ours. The folder gets its name only when it is
    complete.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError("exists already and is not empty", where=str(folder), hint="name a new folder")
    _require_state(state, model, folder)
    dtype = next(iter(state.values())).dtype if dtype is None else dtype
    config = json.dumps(to_config(model, dtype=str(dtype).removeprefix("torch.")), indent=2) + "\n"
    partial = new_folder_beside(folder)
    try:
        _write_shards(state, model, partial, max_shard_bytes=max_shard_bytes, dtype=dtype)
        for name, content in {"config.json": config.encode(), **(files or {})}.items():
            (partial / name).write_bytes(content)
        partial.rename(folder)  # onto an empty folder at most: rename refuses any other
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _require_state(state: Mapping[str, Tensor], model: ModelSpec, folder: Path) -> None:
    missing = sorted(state_shapes(model).keys() - state.keys())
    if missing:
        hint = "the state does not belong to this model"
        raise CheckpointError(_describe("missing", missing), where=str(folder), hint=hint)


def _write_shards(
    state: Mapping[str, Tensor], model: ModelSpec, folder: Path, *, max_shard_bytes: int, dtype: torch.dtype
) -> None:
    pieces = _pieces(model)
    shards = _split(_sizes(model, pieces, dtype), max_shard_bytes)
    file_of: dict[str, str] = {}
    total_bytes = 0
    for number, names in enumerate(shards, start=1):
        file = SINGLE_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: _assemble(state, pieces[name], dtype) for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        share_file(folder / file)
        file_of.update(dict.fromkeys(names, file))
        total_bytes += sum(tensor.nbytes for tensor in tensors.values())
    if len(shards) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(file_of.items()))}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


# A part of a tensor on disk: (our name, its layout, which expert or None).
_Piece = tuple[str, Source, int | None]


def _pieces(model: ModelSpec) -> dict[str, list[_Piece]]:
    """The parts of each tensor on disk, in order."""
    pieces: dict[str, list[_Piece]] = {}
    for name, source in sources(model).items():
        for expert, hf_name in enumerate(source.names):
            pieces.setdefault(hf_name, []).append((name, source, expert if source.stacked else None))
    return pieces


def _assemble(state: Mapping[str, Tensor], pieces: list[_Piece], dtype: torch.dtype) -> Tensor:
    parts: list[Tensor] = []
    for name, _, expert in pieces:
        full = state[name].detach()
        parts.append(full if expert is None else full[expert])
    combined = parts[0] if len(parts) == 1 else torch.cat(parts)
    if pieces[0][1].transposed:
        combined = combined.t()
    keeps_dtype = pieces[0][0].endswith("balance_bias")  # its small updates would round to nothing in 16 bits
    # A copy: the writer refuses tensors that share memory.
    return combined.to(device="cpu", dtype=torch.float32 if keeps_dtype else dtype, copy=True).contiguous()


def _sizes(model: ModelSpec, pieces: Mapping[str, list[_Piece]], dtype: torch.dtype) -> dict[str, int]:
    """Bytes of each tensor on disk."""
    shapes = state_shapes(model)

    def elements(piece: _Piece) -> int:
        shape = shapes[piece[0]]
        return torch.Size(shape if piece[2] is None else shape[1:]).numel()

    return {hf_name: sum(map(elements, parts)) * dtype.itemsize for hf_name, parts in pieces.items()}


def _split(sizes: Mapping[str, int], max_bytes: int) -> list[list[str]]:
    """Consecutive names in files of at most `max_bytes` (a single larger tensor gets its own file)."""
    files: list[list[str]] = []
    filled = 0
    for name, size in sizes.items():
        if not files or filled + size > max_bytes:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += size
    return files


def _file_of_tensor(folder: Path) -> dict[str, str]:
    """File by tensor name, from the index or the single file."""
    index, single = folder / INDEX_FILE, folder / SINGLE_FILE
    try:
        if index.exists():
            return _checked_map(read_json_file(index, max_bytes=_MAX_INDEX_BYTES)["weight_map"])
        if single.exists():
            regular_file(single).close()
            with safe_open(single, framework="pt") as handle:
                return dict.fromkeys(handle.keys(), SINGLE_FILE)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(f"damaged: {error}", where=str(folder), hint=_AGAIN) from None
    has_pickle = any(folder.glob("*.bin"))
    hint = "save the model as safetensors first" if has_pickle else f"expected {SINGLE_FILE} or {INDEX_FILE}"
    raise CheckpointError("no safetensors in this folder", where=str(folder), hint=hint)


def _checked_map(weight_map: Any) -> dict[str, str]:
    """The index's map; ValueError where a file is not a plain name in the folder of the index."""
    if not isinstance(weight_map, dict):
        raise ValueError("weight_map is no mapping of tensor names to files")
    for name, file in weight_map.items():
        is_plain = isinstance(file, str) and file == Path(file).name and file.endswith(".safetensors")
        if not is_plain:
            raise ValueError(f"weight_map places {name[:80]!r} in {str(file)[:80]!r}, outside this folder")
    return weight_map


def _shape_on_disk(source: Source, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of each tensor that one of our parameters is read from."""
    shape = shape[1:] if source.stacked else shape
    shape = (3 * shape[0], *shape[1:]) if source.third is not None else shape
    return shape[::-1] if source.transposed else shape


def _padded(index: tuple[slice, ...], num_dims: int) -> tuple[slice, ...]:
    return index + (slice(None),) * (num_dims - len(index))


def _bounds(part: slice, size: int) -> tuple[int, int]:
    first, last, step = part.indices(size)
    assert step == 1, "only contiguous slices"
    return first, last


def _describe(word: str, names: Iterable[str]) -> str:
    names = list(names)
    listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"{len(names)} {word} tensor{'s' * (len(names) > 1)}: {listed}"
