"""Tensors of a file under other names."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping

from torch import Tensor


class RenamedTensors(Mapping[str, Tensor]):
    """Tensors of another framework, under Hugging Face's names; one is read when it is asked for."""

    def __init__(self, place: dict[str, tuple[str, int | None]]) -> None:
        self._place = place
        """Name on disk and, where that tensor is stacked, the number of the part, by Hugging Face's name."""

    @abstractmethod
    def __getitem__(self, name: str) -> Tensor: ...

    def used_names(self) -> set[str]:
        """Names on disk that have one of Hugging Face."""
        return {on_disk for on_disk, _ in self._place.values()}

    def __iter__(self) -> Iterator[str]:
        return iter(self._place)

    def __len__(self) -> int:
        return len(self._place)
