"""Records files: the sources of a loader, opened as the file says, and a report of what they hold."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.data.grouping import group_by_length
from meshwright.data.order import Blocks
from meshwright.data.readers.door import open_source
from meshwright.data.record_sets import JoinedRecords, keys_of, split_by_hash
from meshwright.data.records import RecordSource
from meshwright.errors import DataError
from meshwright.spec.data import BlockShuffleSpec
from meshwright.spec.records import HashPartSpec, RecordSourceSpec, RecordsSpec
from meshwright.units import show_count


def open_records(spec: RecordsSpec) -> list[RecordSource]:
    """The sources of a spec: joined by key, then reduced to their part."""
    return [_opened(source) for source in spec.sources]


def weights_of(spec: RecordsSpec) -> tuple[float, ...] | None:
    """The weights of the sources; None where they have none."""
    weights = tuple(source.weight for source in spec.sources if source.weight is not None)
    return weights or None


def shuffle_of(spec: RecordsSpec) -> bool | Blocks:
    """The shuffle as the order takes it."""
    if isinstance(spec.shuffle, BlockShuffleSpec):
        return Blocks(spec.shuffle.block_samples, spec.shuffle.window_blocks)
    return spec.shuffle


def _opened(spec: RecordSourceSpec) -> RecordSource:
    source = open_source(spec.path, split=spec.split)
    if spec.join:
        source = JoinedRecords([source, *map(open_source, spec.join)], missing=spec.missing)
    return source if spec.part is None else _part(source, spec.part)


def _part(source: RecordSource, spec: HashPartSpec) -> RecordSource:
    if spec.name not in spec.shares:
        hint = f"the parts are: {', '.join(spec.shares)}"
        raise DataError(f"there is no part {spec.name!r}", where=source.name, hint=hint)
    keys = keys_of(source) if spec.by == "key" else None
    return split_by_hash(source, spec.shares, keys=keys, seed=spec.seed)[spec.name]


@dataclass(frozen=True)
class RecordReport:
    """What one source of a records file resolves to."""

    name: str
    share: float
    """Share of the samples."""
    num_records: int
    num_groups: int | None
    """Groups of similar lengths; None without `max_tokens`."""
    fill: float | None
    """Share of padded positions of all groups that are tokens."""

    @property
    def line(self) -> str:
        """`images/: 70%, 1,000 records, 120 groups, 97.1% full`."""
        groups = "" if self.num_groups is None else f", {self.num_groups:,} groups, {self.fill:.1%} full"
        return f"{self.name}: {self.share:.3g}%, {show_count(self.num_records)} records{groups}"


def report_records(spec: RecordsSpec) -> list[RecordReport]:
    """The sources of a records file; opens each, reads no record but for joins and splits by key."""
    sources = open_records(spec)
    shares = _shares(spec, sources)
    return [_report(spec, source, share) for source, share in zip(sources, shares, strict=True)]


def _shares(spec: RecordsSpec, sources: Sequence[RecordSource]) -> list[float]:
    weights = weights_of(spec) or tuple(float(len(source)) for source in sources)
    return [100 * weight / sum(weights) for weight in weights]


def _report(spec: RecordsSpec, source: RecordSource, share: float) -> RecordReport:
    if spec.max_tokens is None:
        return RecordReport(source.name, share, len(source), None, None)
    lengths = source.lengths()
    if lengths is None:
        raise DataError(
            "the source has no lengths to group by", where=source.name, hint="leave out max_tokens"
        )
    groups = group_by_length(np.asarray(lengths), max_tokens=spec.max_tokens, seed=spec.seed)
    return RecordReport(source.name, share, len(source), len(groups), groups.fill(lengths))
