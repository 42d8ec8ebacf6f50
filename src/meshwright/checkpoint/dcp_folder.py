"""Tensors of a folder of torch's distributed checkpoint (DCP), as torchtitan writes it; nothing is executed.

The list of tensors (`.metadata`) is a pickle. It is read by an unpickler that knows the classes of that list,
dtypes and sizes, and refuses every other name. Each tensor is read by torch with `weights_only=True`.
"""

import io
import pickle
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path, PosixPath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata

from meshwright.errors import CheckpointError
from meshwright.files import regular_file

DCP_METADATA = ".metadata"
_MAX_METADATA_BYTES = 2**30
_METADATA_CLASSES = (
    "Metadata",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "TensorProperties",
    "ChunkStorageMetadata",
    "MetadataIndex",
    "StorageMeta",
    "_MEM_FORMAT_ENCODING",
)
_ALLOWED: dict[tuple[str, str], Any] = {
    **{(metadata.__name__, name): getattr(metadata, name) for name in _METADATA_CLASSES},
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    (filesystem.__name__, "_StoragePrefix"): filesystem._StoragePrefix,
    ("torch", "Size"): torch.Size,
    ("collections", "OrderedDict"): OrderedDict,
    ("pathlib", "PosixPath"): PosixPath,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
}


class _MetadataUnpickler(pickle.Unpickler):
    """Builds the list of tensors of a DCP folder; any other class or function is refused."""

    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not part of a list of tensors")


def is_dcp_folder(folder: Path) -> bool:
    """Whether this folder has a list of tensors of a distributed checkpoint."""
    return (folder / DCP_METADATA).is_file()


class DcpTensors(Mapping[str, Tensor]):
    """Full tensors of a DCP folder by their names there; a tensor is read when it is accessed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        found = _read_metadata(folder / DCP_METADATA)
        try:
            entries = found.state_dict_metadata.items()
            self._tensors = {
                str(name): entry for name, entry in entries if hasattr(entry, "chunks") and entry.chunks
            }
            self._parts: dict[str, list[tuple[Any, Any]]] = defaultdict(list)
            for index, info in found.storage_data.items():
                self._parts[str(index.fqn)].append((index, info))
        except (AttributeError, TypeError) as error:
            raise _damaged(folder / DCP_METADATA, error) from None

    def __getitem__(self, name: str) -> Tensor:
        entry = self._tensors[name]
        try:
            tensor = torch.empty(tuple(entry.size), dtype=entry.properties.dtype)
            num_read = 0
            for index, info in self._parts[name]:
                part = self._read(info)
                offset = tuple(index.offset) if index.offset is not None else (0,) * part.ndim
                slices = tuple(slice(o, o + n) for o, n in zip(offset, part.shape, strict=True))
                tensor[slices].copy_(part)
                num_read += part.numel()
        except (OSError, RuntimeError, ValueError, TypeError, AttributeError, EOFError) as error:
            raise _damaged(self._folder / DCP_METADATA, error) from None
        except pickle.UnpicklingError as error:
            raise _damaged(self._folder, error) from None
        if num_read != tensor.numel():
            fact = f"{name} has {num_read} of {tensor.numel()} elements"
            raise CheckpointError(fact, where=str(self._folder), hint="is a file of the folder missing?")
        return tensor

    def _read(self, info: Any) -> Tensor:
        name = str(info.relative_path)
        if Path(name).name != name:
            raise ValueError(f"{name!r} is not the name of a file of the folder")
        if getattr(info, "transform_descriptors", None):
            raise ValueError("its files are compressed, which is not supported")
        with regular_file(self._folder / name) as stream:
            stream.seek(info.offset)
            content = io.BytesIO(stream.read(info.length))
        found = torch.load(content, map_location="cpu", weights_only=True)
        if not isinstance(found, Tensor):
            raise ValueError(f"{name} holds a {type(found).__name__} where a tensor is expected")
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _read_metadata(path: Path) -> Any:
    if path.stat().st_size > _MAX_METADATA_BYTES:
        raise CheckpointError("the list of tensors is too large", where=str(path))
    try:
        with regular_file(path) as stream:
            return _MetadataUnpickler(stream).load()
    except Exception as error:  # a damaged pickle raises anything
        raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> CheckpointError:
    text = " ".join(str(error).split())[:300]
    return CheckpointError(
        f"the distributed checkpoint cannot be read: {type(error).__name__}: {text}",
        where=str(path),
        hint="only tensors of torch's own DCP writer are read",
    )
