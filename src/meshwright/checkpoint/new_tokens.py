"""New tokens: rows at the end of the vocabulary that the weights of a run's start do not have.

Each starts as the mean of the rows that are there: a random row in the head would give new tokens larger
logits than most others. The mean is computed from the full table in fp64, so any mesh has the same rows.
"""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from meshwright.models.hf_weights import HuggingFaceReader
from meshwright.spec import ModelSpec
from meshwright.spec.adapter import token_tables

_ROWS_AT_ONCE = 2**14

ReadRows = Callable[[slice], Tensor]
"""Reads rows of a table."""


def read_with_new_rows(
    reader: HuggingFaceReader, name: str, index: tuple[slice, ...], num_new: int
) -> Tensor:
    """A slice of a tensor of the run's model; rows of new tokens are the mean of the folder's rows."""
    num_there = reader.model.vocab_size
    is_table = num_new > 0 and name in [one.name for one in token_tables(reader.model)]
    if not is_table or index[0].stop <= num_there:
        return reader.read_slice(name, index)
    rows, columns = index
    there = reader.read_slice(name, (slice(min(rows.start, num_there), num_there), columns))
    mean_D = mean_row(lambda part: reader.read_slice(name, (part,)), num_there)[columns]
    count = rows.stop - max(rows.start, num_there)
    return torch.cat([there, mean_D.to(there.dtype).expand(count, -1)])


def mean_row(read: ReadRows, num_rows: int) -> Tensor:
    """The mean of all rows of a table, in fp64."""
    starts = range(0, num_rows, _ROWS_AT_ONCE)
    parts = [read(slice(start, min(start + _ROWS_AT_ONCE, num_rows))).double().sum(0) for start in starts]
    return torch.stack(parts).sum(0) / num_rows


class ExtendedTensors(Mapping[str, Tensor]):
    """The tensors of a model with the rows of new tokens."""

    def __init__(self, base: Mapping[str, Tensor], model: ModelSpec, num_new: int) -> None:
        self._base, self._num_new = base, num_new
        self._tables = {one.name for one in token_tables(model)}

    def __getitem__(self, name: str) -> Tensor:
        value = self._base[name]
        if name not in self._tables:
            return value
        mean_D = mean_row(value.__getitem__, len(value)).to(value.dtype)
        return torch.cat([value, mean_D.expand(self._num_new, -1)])

    def __iter__(self) -> Iterator[str]:
        return iter(self._base)

    def __len__(self) -> int:
        return len(self._base)
