"""Which records come when: a pure function of sources, weights, seed and position, without any reading.

The unit of the order is a record, or a group of records of similar lengths. The position counts units over
all epochs and ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.data.blend import Blend, Phase
from meshwright.data.grouping import Groups, group_by_length
from meshwright.data.order import Blocks, SampleOrder
from meshwright.data.records import RecordSource
from meshwright.data.stream_position import fact_text, facts_number
from meshwright.errors import DataError


class Unit(NamedTuple):
    """A record or a group of records, and the epoch of its source."""

    source: int
    unit: int
    epoch: int


@dataclass(frozen=True)
class OrderSettings:
    """What the order of records depends on, beside the records."""

    seed: int = 0
    shuffle: bool | Blocks = True
    """True: a permutation of all records in each epoch; Blocks: a shuffle by blocks, for slow storage."""
    weights: tuple[float, ...] | None = None
    """Weights of the sources; None: in proportion to their records, each source once per epoch."""
    max_epochs: int | None = None
    """Epochs of each source before it ends; None repeats without end."""
    max_tokens: int | None = None
    """The budget of a group of similar lengths; None: no groups."""


class RecordPlan:
    """The units of a stream of records by position."""

    def __init__(self, sources: Sequence[RecordSource], settings: OrderSettings) -> None:
        self.sources, self.settings = tuple(sources), settings
        self.groups = None if settings.max_tokens is None else [self._groups(one) for one in sources]
        counts = [len(one) for one in (self.groups or sources)]
        if min(counts, default=0) == 0:
            raise DataError("a source has no records", where=", ".join(one.name for one in sources))
        if settings.weights is not None and len(settings.weights) != len(sources):
            fact = f"{len(settings.weights)} weights for {len(sources)} sources"
            raise DataError(fact, where="weights", hint="give each source a weight")
        blocks = settings.shuffle if isinstance(settings.shuffle, Blocks) else None
        is_shuffled, total = settings.shuffle is not False, sum(counts)
        self._offsets = np.concatenate([[0], np.cumsum(counts)])
        self._all = SampleOrder(total, settings.seed, is_shuffled, blocks)
        self._orders = [
            SampleOrder(count, settings.seed, is_shuffled, blocks, number + 1)
            for number, count in enumerate(counts)
        ]
        limits = [None if settings.max_epochs is None else settings.max_epochs * one for one in counts]
        self._blend = Blend([Phase(0, settings.weights)], limits) if settings.weights else None
        end = None if settings.max_epochs is None else settings.max_epochs * total
        self.num_units = self._blend.num_samples if self._blend else end
        """Units until the stream ends; None where it repeats without end."""
        self.facts = self._facts()
        self.number = facts_number(self.facts)

    def units(self, position: int, count: int) -> list[Unit]:
        """The `count` units from a position on, fewer at the end of the stream."""
        if self.num_units is not None:
            count = max(0, min(count, self.num_units - position))
        index = np.arange(position, position + count, dtype=np.int64)
        sources, ids, epochs = self._blended(index) if self._blend else self._concatenated(index)
        return [Unit(*one) for one in zip(sources.tolist(), ids.tolist(), epochs.tolist(), strict=True)]

    def _concatenated(self, index: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
        """(source, unit, epoch) at each index of all sources as one."""
        ids = self._all.at(index)
        sources = np.searchsorted(self._offsets, ids, side="right") - 1
        return sources, ids - self._offsets[sources], index // self._all.num_samples

    def _blended(self, index: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
        """(source, unit, epoch of the source) at each index of a blend with weights."""
        assert self._blend is not None
        sources, numbers = self._blend.at(index)
        ids, epochs = np.empty_like(index), np.empty_like(index)
        for source in np.unique(sources).tolist():
            here, order = sources == source, self._orders[source]
            ids[here] = order.at(numbers[here])
            epochs[here] = numbers[here] // order.num_samples
        return sources, ids, epochs

    def num_epochs(self, position: int) -> int:
        """Complete passes over all units before a position; with weights, over all sources together."""
        return position // self._all.num_samples

    def unit_id(self, unit: Unit) -> int:
        """The number of a unit among those of all sources."""
        return int(self._offsets[unit.source]) + unit.unit

    def records(self, unit: Unit) -> list[int]:
        """The records of a unit, by their number in its source."""
        return [unit.unit] if self.groups is None else self.groups[unit.source].group(unit.unit).tolist()

    def _groups(self, source: RecordSource) -> Groups:
        lengths = source.lengths()
        if lengths is None:
            fact, hint = "the source has no lengths to group by", "leave out max_tokens"
            raise DataError(fact, where=source.name, hint=hint)
        return group_by_length(lengths, max_tokens=self.settings.max_tokens or 0, seed=self.settings.seed)

    def _facts(self) -> dict[str, str]:
        settings = self.settings
        return {
            "dataset fingerprint": fact_text([source.fingerprint for source in self.sources]),
            "seed": str(settings.seed),
            "weights": fact_text(settings.weights),
            "shuffle": fact_text(settings.shuffle),
            "max_epochs": str(settings.max_epochs),
            "max_tokens": str(settings.max_tokens),
        }
