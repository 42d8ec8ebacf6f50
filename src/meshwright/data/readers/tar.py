"""Tar shards (WebDataset) with random access: the record of any index costs one read."""

import hashlib
import itertools
import struct
import threading
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import psutil
from numpy.typing import NDArray

from meshwright.data.file_check import FileState, sampled_hash
from meshwright.data.readers import energon
from meshwright.data.readers.byte_files import ByteFile, LocalFile
from meshwright.data.readers.places import LocalPlace, Place, place_at
from meshwright.data.readers.tar_format import BLOCK, Member, Sliced, members, sample_name
from meshwright.data.readers.tar_index import FACTS_FILE, ShardFacts, fields_name, read_facts, read_offsets
from meshwright.data.records import KEY, Record, RecordError
from meshwright.errors import DataError

Access = Literal["map", "read"]
# Open shards; each keeps a file descriptor, of which a process usually has 1024.
_MAX_OPEN = 256
# Shards whose state one call of `require_unchanged` compares: a stat takes about two microseconds.
_CHECKED_AT_ONCE = 64
_PLAIN_HEADER = struct.Struct("100s24x11s21xs100x5s83xs").unpack_from


class TarShards:
    """The samples of all shards in order. Fields are bytes; `decode` makes images and texts of them."""

    def __init__(
        self,
        folder: Path | str | Place,
        *,
        split: str | None = None,
        shard: str | None = None,
        access: Access | None = None,
    ) -> None:
        """Open the shards of a split (all of them where it is None), or one of them, from a disk or a store.

        `access` is "map" (memory map) where the shards fit into half of the memory, so that they stay in the
        page cache, and "read" (pread) for larger datasets: cold data then costs exactly the bytes asked for.
        """
        place = place_at(folder) if isinstance(folder, (str, Path)) else folder
        prepared = energon.read_prepared(_with_meta(place))
        self._place, self.name = place, f"{place.name}/{shard}" if shard else place.name
        self._names = _chosen(prepared, place.name, split=split, shard=shard)
        self._counts = [prepared.shard_counts[name] for name in self._names]
        self._starts = [0, *itertools.accumulate(self._counts)]
        self._facts = read_facts(place.root)
        self._states = {name: place.state(name) for name in self._names}
        _require_sizes(self._states, self._facts, place.name)
        self._access: Access = access or _fitting_access(self._states)
        self._kept = _kept_samples(prepared.excluded, self._names, self._starts)
        self._reset()

    @property
    def fingerprint(self) -> str:
        """A hash of the order, sizes and sampled content of the shards."""
        digest = hashlib.sha256()
        for name in self._names:
            facts = self._facts.get(name)
            content = facts.sampled.encode() if facts else self._offsets(name).tobytes()
            digest.update(f"{name}:{self._states[name].num_bytes}:".encode() + content)
        if self._kept is not None:
            digest.update(self._kept.tobytes())
        return digest.hexdigest()[:16]

    def __len__(self) -> int:
        return self._starts[-1] if self._kept is None else len(self._kept)

    def record(self, index: int) -> Record:
        """The sample at `index`: its key, and each field as bytes."""
        if self._kept is not None:
            index = int(self._kept[index])
        number = bisect_right(self._starts, index) - 1
        if not 0 <= number < len(self._names):
            raise IndexError(index)
        shard = self._open.get(number) or self._opened(number)
        return shard.record(index - self._starts[number])

    def lengths(self) -> NDArray[np.int64]:
        """Bytes of each sample in its archive, headers included."""
        sizes = [np.diff(self._offsets(name).astype(np.int64)) for name in self._names]
        joined = np.concatenate(sizes) if sizes else np.zeros(0, dtype=np.int64)
        return joined if self._kept is None else joined[self._kept]

    def require_unchanged(self) -> None:
        """DataError where a shard was changed since it was opened; each call compares some of them."""
        for name in itertools.islice(self._checked, min(_CHECKED_AT_ONCE, len(self._names))):
            if isinstance(self._place, LocalPlace) and self._place.state(name) != self._states[name]:
                raise self._stale(name, "the shard was changed while it was in use")
        for shard in list(self._open.values()):
            if not isinstance(self._place, LocalPlace):
                shard.file.require_unchanged()

    def _offsets(self, name: str) -> NDArray[np.uint64]:
        offsets = read_offsets(self._place.fetch(f"{name}{energon.INDEX_SUFFIX}"))
        expected = self._counts[self._names.index(name)]
        if len(offsets) - 1 != expected:
            fact = f"the index has {len(offsets) - 1} samples, {energon.INFO_FILE} has {expected}"
            raise self._stale(name, fact)
        if offsets[-1] > self._states[name].num_bytes:
            fact = f"the shard has {self._states[name].num_bytes} bytes, its index ends at {offsets[-1]}"
            raise self._stale(name, fact)
        return offsets

    def _opened(self, number: int) -> "_Shard":
        name = self._names[number]
        self._require_content(name)
        shard = self._make(name)
        with self._lock:
            if len(self._open) >= _MAX_OPEN:  # the one opened first; threads that still read it keep it open
                self._open.pop(next(iter(self._open)))
            self._open[number] = shard
        return shard

    def _make(self, name: str) -> "_Shard":
        file, facts = self._place.open(name), self._facts.get(name)
        content = file.mapped() if self._access == "map" and isinstance(file, LocalFile) else None
        if facts is None or facts.fields is None:
            return _ParsedShard(file, content, self._offsets(name))
        path = self._place.fetch(fields_name(name))
        table = np.load(path, mmap_mode="r")
        if table.shape != (facts.num_samples, 2 + 2 * len(facts.fields)) or table.dtype != np.int64:
            raise self._stale(name, f"{path.name} does not fit the shard")
        if content is None:
            return _ReadShard(file, table, facts.fields)
        return _MappedShard(file, content, table, facts.fields)

    def _require_content(self, name: str) -> None:
        """A copied shard has another modification time, and the same content."""
        facts, state = self._facts.get(name), self._states[name]
        if facts is None or state.modified_ns == facts.modified_ns or not isinstance(self._place, LocalPlace):
            return
        if sampled_hash(self._place.root / name) != facts.sampled:
            raise self._stale(name, "the shard was changed since it was indexed")

    def _stale(self, name: str, fact: str) -> DataError:
        return _stale(f"{self._place.name}/{name}", fact)

    def _reset(self) -> None:
        self._open: dict[int, _Shard] = {}
        self._lock = threading.Lock()
        self._checked: Iterator[str] = itertools.cycle(self._names)

    def __getstate__(self) -> dict[str, object]:
        """Worker processes open the files themselves."""
        return {
            key: value for key, value in self.__dict__.items() if key not in ("_open", "_lock", "_checked")
        }

    def __setstate__(self, state: Mapping[str, object]) -> None:
        self.__dict__.update(state)
        self._reset()


class _Shard(Protocol):
    file: ByteFile

    def record(self, index: int) -> Record: ...


class _MappedShard:
    """A mapped shard with a table of byte ranges: a record is a row of the table and one slice per field."""

    def __init__(
        self, file: ByteFile, content: Sliced, table: NDArray[np.int64], fields: tuple[str, ...]
    ) -> None:
        self.file, self._content, self._fields = file, content, fields
        self._rows = memoryview(table.data).cast("B")
        self._row = struct.Struct(f"{table.shape[1]}q").unpack_from
        self._row_bytes = 8 * table.shape[1]

    def record(self, index: int) -> Record:
        content, row, at = self._content, self._row(self._rows, index * self._row_bytes), 2
        record: dict[str, bytes | str] = {KEY: str(content[row[0] : row[1]], "utf-8", "surrogateescape")}
        for field in self._fields:
            record[field] = content[row[at] : row[at + 1]]
            at += 2
        return record


class _ReadShard(_MappedShard):
    """The same with one read for each record."""

    def __init__(self, file: ByteFile, table: NDArray[np.int64], fields: tuple[str, ...]) -> None:
        super().__init__(file, b"", table, fields)

    def record(self, index: int) -> Record:
        row, at = self._row(self._rows, index * self._row_bytes), 2
        begin = row[0]
        content = self.file.read_at(begin, row[-1] - begin)
        record: dict[str, bytes | str] = {KEY: str(content[: row[1] - begin], "utf-8", "surrogateescape")}
        for field in self._fields:
            record[field] = content[row[at] - begin : row[at + 1] - begin]
            at += 2
        return record


class _ParsedShard:
    """A shard with Energon's offsets alone: the headers are parsed for each record."""

    def __init__(self, file: ByteFile, content: Sliced | None, offsets: NDArray[np.uint64]) -> None:
        self.file, self._content = file, content
        self._offsets = offsets.astype(np.int64).data
        self._fields: dict[bytes, str] = {}

    def record(self, index: int) -> Record:
        begin, end = self._offsets[index], self._offsets[index + 1]
        content = self.file.read_at(begin, end - begin) if self._content is None else self._content[begin:end]
        return self._plain(content) or self._any(content, begin)

    def _plain(self, content: bytes) -> dict[str, bytes | str] | None:
        """The record where all headers are plain ones; None where a slower look is needed."""
        record: dict[str, bytes | str] = {}
        key, dot, at = b"", 0, 0
        while at < len(content):
            name, size, kind, magic, prefix = _PLAIN_HEADER(content, at)
            if kind != b"0" or magic != b"ustar" or prefix != b"\0" or not size.isdigit():
                return None
            if not record:
                dot = name.find(b".", name.rfind(b"/") + 1)
                key = name[:dot]
                record[KEY] = key.decode(errors="surrogateescape")
            start = at + BLOCK
            end = start + int(size, 8)
            field = self._fields.get(name[dot:])
            if field is None:
                field = self._fields[name[dot:]] = (
                    name[dot + 1 :].rstrip(b"\0").decode(errors="surrogateescape")
                )
            if name[:dot] != key or dot < 1 or key.startswith(b"__") or end > len(content):
                return None
            record[field] = content[start:end]
            at = (end + BLOCK - 1) & -BLOCK
        return record

    def _any(self, content: bytes, begin: int) -> Record:
        record: dict[str, bytes | str] = {}
        try:
            found = [
                each
                for each in members(content, len(content), file=self.file.name)
                if isinstance(each, Member)
            ]
        except RecordError as error:
            offset = begin + (error.offset or 0)
            raise _stale(self.file.name, f"{error.fact} (offset {offset})") from None
        for member in found:
            names = sample_name(member)
            if names is not None and record.setdefault(KEY, names[0]) == names[0]:
                record[names[1]] = content[member.start : member.start + member.num_bytes]
        if not record:
            raise _stale(self.file.name, f"there is no sample at offset {begin}")
        return record


def _chosen(prepared: energon.Prepared, where: str, *, split: str | None, shard: str | None) -> list[str]:
    names = list(prepared.shard_counts)
    if shard is not None:
        names = [shard]
    elif split is not None:
        if split not in prepared.splits:
            known = ", ".join(prepared.splits) or "none"
            raise DataError(f"there is no split {split!r}", where=where, hint=f"the splits are: {known}")
        names = prepared.splits[split]
    names = [name for name in names if name not in prepared.excluded]
    if unknown := [name for name in names if name not in prepared.shard_counts]:
        hint = "index the folder again: `meshwright data index`"
        raise DataError(f"the shard {unknown[0]} is not in the index", where=where, hint=hint)
    if not names:
        raise DataError(f"the split {split!r} has no shards", where=where)
    return names


def _kept_samples(excluded: frozenset[str], names: list[str], starts: list[int]) -> NDArray[np.int64] | None:
    """The samples that are not excluded one by one; None where none is."""
    left_out: list[int] = []
    for each in excluded:
        name, _, index = each.rpartition("/")
        if index.isdigit() and name in names:
            left_out.append(starts[names.index(name)] + int(index))
    return np.setdiff1d(np.arange(starts[-1]), left_out) if left_out else None


def _fitting_access(states: Mapping[str, FileState]) -> Access:
    total = sum(state.num_bytes for state in states.values())
    return "map" if total <= psutil.virtual_memory().total // 2 else "read"


def _require_sizes(states: Mapping[str, FileState], facts: Mapping[str, ShardFacts], where: str) -> None:
    for name, state in states.items():
        if name in facts and facts[name].num_bytes != state.num_bytes:
            fact = (
                f"the shard has {state.num_bytes} bytes, and had {facts[name].num_bytes} when it was indexed"
            )
            raise _stale(f"{where}/{name}", fact)


def _with_meta(place: Place) -> Path:
    """The local folder with the files of `.nv-meta` that a reader needs."""
    if isinstance(place, LocalPlace):
        return place.root
    names = (energon.INFO_FILE, ".info.yaml", energon.SPLIT_FILE, "split.json", FACTS_FILE)
    for name in (f"{energon.META_FOLDER}/{name}" for name in names):
        if place.exists(name):
            place.fetch(name)
    return place.root


def _stale(where: str, fact: str) -> DataError:
    return DataError(fact, where=where, hint="index the shards again: `meshwright data index`")
