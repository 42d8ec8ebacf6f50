"""The header of a shard file, with the dtypes of torch."""

from pathlib import Path
from typing import NamedTuple

import torch

from meshwright.checkpoint.shard_file import DTYPE_NAMES
from meshwright.spec.huggingface.tensor_file import TensorFile

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class StoredTensor(NamedTuple):
    """Where a tensor is in a shard file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class ShardHeader:
    """The tensors of one shard file."""

    def __init__(self, path: Path) -> None:
        """Read the header; ValueError where it is not one."""
        self._file = TensorFile(path)
        self.end = self._file.end
        """Where the header ends and the data begins."""

    def tensor(self, name: str) -> StoredTensor:
        """Where a tensor is; KeyError, TypeError or ValueError where its entry is missing or damaged."""
        dtype, shape, begin, end = self._file.tensor(name)
        return StoredTensor(_DTYPES[dtype], shape, begin, end)
