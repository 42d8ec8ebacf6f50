"""Reads the records of units and makes samples of them, in this process, a thread or a worker process."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from meshwright.data.bad_samples import substitutes
from meshwright.data.order import sample_rng
from meshwright.data.record_plan import RecordPlan, Unit
from meshwright.data.records import Record, RecordError

Transform = Callable[[Record, np.random.Generator], Any]
"""Makes a sample of a record: decoding and augmentation. The random numbers follow from seed, epoch and
record alone, so they are the same on any number of ranks and workers."""


class Fetched(NamedTuple):
    """The samples of one rank's part of a batch."""

    content: Any
    bad: dict[str, str]
    """Corrupt records by their place, with what took it."""


@dataclass(frozen=True)
class Fetcher:
    """Reads units. It pickles, so worker processes have one too."""

    plan: RecordPlan
    transform: Transform | None
    collate: Callable[[list[Any]], Any]
    replaces_bad: bool

    def __call__(self, units: list[Unit]) -> Fetched:
        """The collated samples of these units: one batch, or a list with one for each group."""
        bad: dict[str, str] = {}
        parts = [[self._sample(unit, one, bad) for one in self.plan.records(unit)] for unit in units]
        if self.plan.groups is not None:
            return Fetched([self.collate(part) for part in parts], bad)
        return Fetched(self.collate([sample for part in parts for sample in part]), bad)

    def _sample(self, unit: Unit, number: int, bad: dict[str, str]) -> Any:
        source = self.plan.sources[unit.source]
        try:
            return self._made(unit, number)
        except RecordError as error:
            if not self.replaces_bad:
                raise
            for other in substitutes(number, len(source)):
                try:
                    sample = self._made(unit, other)
                except RecordError:
                    continue
                bad[error.where] = f"{error.fact}; record {other} takes its place"
                return sample
            raise

    def _made(self, unit: Unit, number: int) -> Any:
        record = self.plan.sources[unit.source].record(number)
        if self.transform is None:
            return record
        rng = sample_rng(self.plan.settings.seed, unit.epoch, number, source=unit.source)
        return self.transform(record, rng)
