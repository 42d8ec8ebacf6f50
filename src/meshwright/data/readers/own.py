"""A user's own dataset as a record source: anything with `__len__` and `__getitem__`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from meshwright.data.records import KEY, Field, Record, RecordError
from meshwright.errors import DataError


class MapStyle(Protocol):
    """A map-style dataset of torch, a list, or a class of one's own."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class OwnDataset:
    """Records of a map-style dataset.

    An item that is a mapping is a record as it is; a tuple becomes the fields named by `fields`, and anything
    else the field `value`. `fingerprint` is a text of the user that changes with the content, because nobody
    else knows when it does: a resume refuses a dataset with another one.
    """

    def __init__(
        self,
        dataset: MapStyle,
        *,
        fingerprint: str,
        name: str | None = None,
        fields: Sequence[str] = (),
        length_of: Callable[[int], int] | None = None,
    ) -> None:
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            hint = "it needs `__len__` and `__getitem__`; write a stream to files first"
            raise DataError(
                f"{type(dataset).__name__} is no map-style dataset", where="OwnDataset", hint=hint
            )
        self.dataset, self.fingerprint = dataset, fingerprint
        self.name = name or type(dataset).__name__
        self._fields, self._length_of = tuple(fields), length_of

    def __len__(self) -> int:
        return len(self.dataset)

    def record(self, index: int) -> Record:
        """The item at `index` as a record; RecordError where the user's code raises."""
        try:
            item = self.dataset[index]
        except Exception as error:
            fact = f"the dataset raised {type(error).__name__}: {error}"
            raise RecordError(fact, file=self.name, key=str(index)) from error
        return {KEY: str(index), **self._named(item)}

    def lengths(self) -> NDArray[np.int64] | None:
        """Lengths by `length_of`; None where it was not given."""
        if self._length_of is None:
            return None
        return np.fromiter(
            (self._length_of(index) for index in range(len(self))), dtype=np.int64, count=len(self)
        )

    def require_unchanged(self) -> None:
        """Does nothing: only the user knows."""

    def _named(self, item: Any) -> Mapping[str, Field]:
        if isinstance(item, Mapping):
            return {str(name): _field(value) for name, value in item.items()}
        if isinstance(item, tuple):
            names = self._fields or tuple(str(number) for number in range(len(item)))
            if len(names) != len(item):
                fact = f"an item has {len(item)} parts, and `fields` names {len(names)}"
                raise DataError(fact, where=self.name)
            return {name: _field(value) for name, value in zip(names, item, strict=True)}
        return {self._fields[0] if self._fields else "value": _field(item)}


def _field(value: Any) -> Field:
    if isinstance(value, (bytes, str, int, float, np.ndarray)):
        return value
    if hasattr(value, "numpy"):  # a tensor
        return value.numpy()
    return np.asarray(value)
