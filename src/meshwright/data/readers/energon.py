"""The files that Megatron-Energon keeps beside tar shards, read and written.

    shard-0000.tar.idx      n + 1 little-endian uint64: where each sample begins, and where the last one ends
    .nv-meta/.info.json     number of samples of each shard, in the order of the dataset
    .nv-meta/split.yaml     the shards of train, val and test
    .nv-meta/dataset.yaml   how Energon makes samples of the fields
    .nv-meta/index.sqlite   key, offset and fields of each sample: Energon joins datasets with it
    .nv-meta/index.uuid     a new id for each preparation

A dataset that was prepared for Energon opens here without another step, and the other way round.
"""

import itertools
import re
import sqlite3
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from meshwright.data.file_check import damaged
from meshwright.data.readers.tar_format import TarSample
from meshwright.errors import DataError, read_trouble
from meshwright.files import MIB, read_bounded, read_json_file

META_FOLDER = ".nv-meta"
INFO_FILE, SPLIT_FILE, DATASET_FILE = ".info.json", "split.yaml", "dataset.yaml"
SQLITE_FILE, UUID_FILE = "index.sqlite", "index.uuid"
INDEX_SUFFIX = ".idx"
# Energon reads every field as it is ("crude"); the task encoder of the training then decodes them.
DATASET_TEXT = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"
_MAX_INFO_BYTES = 512 * MIB
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_MAX_EXPANDED = 10_000_000

_TABLES = """
CREATE TABLE samples (
    tar_file_id INTEGER NOT NULL, sample_key TEXT NOT NULL UNIQUE, sample_index INTEGER NOT NULL,
    byte_offset INTEGER, byte_size INTEGER);
CREATE TABLE sample_parts (
    tar_file_id INTEGER, sample_index INTEGER, part_name TEXT,
    content_byte_offset INTEGER, content_byte_size INTEGER);
"""
_INDEXES = """
CREATE INDEX idx_samples_by_tar_and_idx ON samples(tar_file_id, sample_index);
CREATE INDEX idx_sample_parts_seq ON sample_parts(tar_file_id, sample_index, content_byte_offset);
CREATE INDEX idx_sample_parts_full ON sample_parts(
    tar_file_id, sample_index, part_name, content_byte_offset, content_byte_size);
"""


@dataclass(frozen=True)
class Prepared:
    """What `.nv-meta` says about a dataset."""

    shard_counts: dict[str, int]
    """Samples of each shard, by its path relative to the dataset, in order."""
    splits: dict[str, list[str]]
    """Shards of each split; empty where there is no split file."""
    excluded: frozenset[str] = field(default_factory=frozenset)
    """`shard` or `shard/index`: what the split file leaves out."""


def read_prepared(folder: Path) -> Prepared:
    """The shards, counts and splits in the `.nv-meta` folder of a dataset."""
    meta = folder / META_FOLDER
    counts = _mapping(meta, INFO_FILE, ".info.yaml").get("shard_counts")
    if not isinstance(counts, dict) or not all(isinstance(n, int) and n >= 0 for n in counts.values()):
        raise damaged(meta / INFO_FILE, "there is no `shard_counts` with the number of samples of each shard")
    split = _mapping(meta, SPLIT_FILE, "split.json", is_needed=False)
    parts = split.get("split_parts") or {}
    splits = {str(name): _expanded_all(shards or [], meta / SPLIT_FILE) for name, shards in parts.items()}
    excluded = frozenset(_expanded_all(split.get("exclude") or [], meta / SPLIT_FILE))
    return Prepared({str(name): count for name, count in counts.items()}, splits, excluded)


def expand_braces(pattern: str) -> Iterator[str]:
    """The names of a pattern such as `shard-{0000..0019}.tar` or `{a,b}.tar`, in order."""
    match = _BRACES.search(pattern)
    if match is None:
        yield pattern
        return
    before, after = pattern[: match.start()], pattern[match.end() :]
    for choice in _choices(match[1]):
        yield from expand_braces(f"{before}{choice}{after}")


def write_sqlite(path: Path, shards: Iterable[Iterable[TarSample]], ends: list[int]) -> None:
    """The key index of Energon; DataError where two samples have one key."""
    path.unlink(missing_ok=True)
    with sqlite3.connect(path) as database:
        database.executescript(_TABLES)
        for shard_id, shard in enumerate(shards):
            _insert(database, shard_id, list(shard), ends[shard_id], path)
        database.executescript(_INDEXES)
    database.close()


def split_text(shards: list[str]) -> str:
    """A split file with every shard in `train`."""
    parts = {"train": shards, "val": [], "test": []}
    return yaml.safe_dump({"split_parts": parts, "exclude": []}, sort_keys=False)


def new_uuid() -> str:
    """The id of a preparation."""
    return str(uuid.uuid4())


def _insert(
    database: sqlite3.Connection, shard_id: int, shard: list[TarSample], end: int, path: Path
) -> None:
    offsets = [sample.offset for sample in shard] + [end]
    rows = (
        (shard_id, sample.key, index, offsets[index], offsets[index + 1] - offsets[index])
        for index, sample in enumerate(shard)
    )
    parts = (
        (shard_id, index, part.field, part.start, part.num_bytes)
        for index, sample in enumerate(shard)
        for part in sample.parts
    )
    try:
        database.executemany("INSERT INTO samples VALUES (?, ?, ?, ?, ?)", rows)
        database.executemany("INSERT INTO sample_parts VALUES (?, ?, ?, ?, ?)", parts)
    except sqlite3.IntegrityError:
        seen = {sample.key for sample in shard}
        known = database.execute("SELECT sample_key FROM samples")
        key = next((row[0] for row in known if row[0] in seen), shard[0].key)
        hint = "rename the members: put each shard's files in a folder of its own"
        raise DataError(
            f"two samples have the key {key!r}", where=str(path.parent.parent), hint=hint
        ) from None


def _mapping(meta: Path, *names: str, is_needed: bool = True) -> dict[str, Any]:
    path = next((meta / name for name in names if (meta / name).is_file()), None)
    if path is None:
        if not is_needed:
            return {}
        raise damaged(meta / names[0], "the file is missing")
    try:
        if path.suffix == ".json":
            value = read_json_file(path, max_bytes=_MAX_INFO_BYTES)
        else:
            value = yaml.safe_load(read_bounded(path, max_bytes=_MAX_INFO_BYTES))
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise damaged(path, f"the file cannot be read: {read_trouble(error)}") from error
    if not isinstance(value, dict):
        raise damaged(path, "the file holds no mapping")
    return value


def _expanded_all(patterns: Any, path: Path) -> list[str]:
    if not isinstance(patterns, list):
        raise damaged(path, f"{str(patterns)[:40]!r} is no list of shards")
    names = list(
        itertools.islice(
            (name for pattern in patterns for name in expand_braces(str(pattern))), _MAX_EXPANDED + 1
        )
    )
    if len(names) > _MAX_EXPANDED:
        raise damaged(path, f"the patterns name more than {_MAX_EXPANDED:,} shards")
    return names


def _choices(inside: str) -> Iterable[str]:
    bounds = _RANGE.fullmatch(inside)
    if bounds is None:
        return inside.split(",") if "," in inside else [inside]
    first, last, width = int(bounds[1]), int(bounds[2]), len(bounds[1])
    return (f"{number:0{width}d}" for number in range(first, last + 1))
