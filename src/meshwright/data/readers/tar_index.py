"""Makes tar shards random-access: one pass over the headers, done once by `meshwright data index`.

Beside the files of Energon's layout it writes two of its own: `.nv-meta/meshwright.json`, with the size,
modification time and a sampled hash of each shard, so that a shard which was changed since is refused; and
`.nv-meta/fields/<shard>.npy`, with the byte range of every field, so that a record needs no header parsing.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.data.file_check import FileState, sampled_hash
from meshwright.data.readers import energon
from meshwright.data.readers.byte_files import LocalFile
from meshwright.data.readers.tar_format import BLOCK, TarEnd, TarSample, samples
from meshwright.data.records import RecordError
from meshwright.errors import DataError
from meshwright.files import MIB, read_json_file

FACTS_FILE, FIELDS_FOLDER = "meshwright.json", "fields"
_PROGRESS_FILE = ".meshwright.partial.jsonl"
_MAX_FACTS_BYTES = 512 * MIB
TAR_SUFFIX = ".tar"
# A longer name is partly in another field of the header.
_NAME_BYTES = 100


@dataclass(frozen=True)
class ShardFacts:
    """A shard as it was indexed."""

    num_bytes: int
    modified_ns: int
    sampled: str
    num_samples: int
    fields: tuple[str, ...] | None
    """The fields of every sample, in order; None where samples of the shard differ."""

    def plain(self) -> dict[str, Any]:
        """The facts as JSON values."""
        return {**self.__dict__, "fields": None if self.fields is None else list(self.fields)}

    @staticmethod
    def of_plain(value: dict[str, Any]) -> "ShardFacts":
        """The facts from JSON values; TypeError or ValueError where they are something else."""
        fields = value.get("fields")
        return ShardFacts(
            num_bytes=int(value["num_bytes"]),
            modified_ns=int(value["modified_ns"]),
            sampled=str(value["sampled"]),
            num_samples=int(value["num_samples"]),
            fields=None if fields is None else tuple(str(each) for each in fields),
        )


class Indexed(NamedTuple):
    """The result of indexing."""

    num_shards: int
    num_samples: int
    num_reused: int
    """Shards whose index was there already and still holds."""
    unmarked: list[str]
    """Shards without the block of zeros that ends an archive: complete so far, but not closed."""


def build_index(
    folder: Path,
    *,
    num_processes: int = 1,
    sqlite: bool = True,
    progress: Callable[[int], object] = lambda num_bytes: None,
) -> Indexed:
    """Index every shard below `folder`; a second call indexes only what is new or changed.

    `.info.json` is written last. After a kill, shards that were finished are not read again.
    """
    names = find_shards(folder)
    meta = folder / energon.META_FOLDER
    meta.mkdir(exist_ok=True)
    known = {name: facts for name, facts in _known(meta).items() if name in names}
    fresh = {name for name, facts in known.items() if _is_current(folder, name, facts)}
    unmarked: list[str] = []
    with (meta / _PROGRESS_FILE).open("a") as log:
        for name in fresh:
            progress(known[name].num_bytes)
        for name, facts, is_marked in _indexed(folder, [n for n in names if n not in fresh], num_processes):
            known[name] = facts
            unmarked += [] if is_marked else [name]
            log.write(json.dumps({"shard": name, **facts.plain()}) + "\n")
            log.flush()
            progress(facts.num_bytes)
    if sqlite and (len(fresh) < len(names) or not (meta / energon.SQLITE_FILE).is_file()):
        _write_sqlite(folder, names)
    _write_meta(meta, {name: known[name] for name in names})
    return Indexed(len(names), sum(known[name].num_samples for name in names), len(fresh), unmarked)


def find_shards(folder: Path) -> list[str]:
    """The tar files below a folder, relative to it, sorted by name."""
    if not folder.is_dir():
        fact = "there is no such folder" if not folder.exists() else "this is no folder"
        raise DataError(fact, where=str(folder), hint="name the folder that holds the .tar shards")
    found = sorted(str(path.relative_to(folder)) for path in folder.rglob(f"*{TAR_SUFFIX}") if path.is_file())
    if not found:
        raise DataError(
            "the folder holds no .tar file", where=str(folder), hint="name the folder of the shards"
        )
    return found


def read_facts(folder: Path) -> dict[str, ShardFacts]:
    """What `data index` recorded about each shard; empty for a dataset that Energon prepared."""
    path = folder / energon.META_FOLDER / FACTS_FILE
    if not path.is_file():
        return {}
    try:
        shards = read_json_file(path, max_bytes=_MAX_FACTS_BYTES)["shards"]
        return {name: ShardFacts.of_plain(facts) for name, facts in shards.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        hint = "index the shards again: `meshwright data index`"
        raise DataError(f"the file is damaged ({error})", where=str(path), hint=hint) from error


def read_offsets(path: Path) -> NDArray[np.uint64]:
    """The offsets of a `.tar.idx` file; DataError where they are not those of an index."""
    hint = "index the shards again: `meshwright data index`"
    try:
        offsets = np.fromfile(path, dtype="<u8")
    except OSError as error:
        fact = f"the index of the shard cannot be read: {error.strerror}"
        raise DataError(fact, where=str(path), hint=hint) from None
    if len(offsets) < 1 or path.stat().st_size % 8 or (offsets[1:] <= offsets[:-1]).any():
        raise DataError("the file is no index: its offsets do not increase", where=str(path), hint=hint)
    return offsets


def fields_name(name: str) -> str:
    """The file with the byte ranges of a shard's fields, relative to the dataset."""
    return f"{energon.META_FOLDER}/{FIELDS_FOLDER}/{name}.npy"


def scan(path: Path) -> tuple[list[TarSample], TarEnd]:
    """Every sample of a shard, from its headers; RecordError where it is damaged, empty or repeats a key."""
    file = LocalFile(path)
    if not file.num_bytes:
        raise RecordError("the shard is an empty file", file=file.name)
    found: list[TarSample] = []
    seen: set[str] = set()
    for sample in samples(file.mapped(), file.num_bytes, file=file.name):
        if isinstance(sample, TarEnd):
            if not found:
                hint = "remove it, or write its samples again; names are `<key>.<field>`"
                raise RecordError("the shard holds no sample", file=file.name, hint=hint)
            return found, sample
        if sample.key in seen:
            hint = "the members of one sample must follow each other; write the shard sorted by name"
            fact = f"the key {sample.key!r} occurs again after other samples"
            raise RecordError(fact, file=file.name, offset=sample.offset, key=sample.key, hint=hint)
        seen.add(sample.key)
        found.append(sample)
    raise AssertionError("the scan of an archive ends with its end")


def index_differences(folder: Path, name: str) -> list[str]:
    """Everything that differs between a shard and its index, as facts; reads every header."""
    try:
        found, end = scan(folder / name)
        offsets = read_offsets(folder / f"{name}{energon.INDEX_SUFFIX}")
    except DataError as error:
        return [str(error)]
    expected = np.array([sample.offset for sample in found] + [end.offset], dtype=np.uint64)
    facts = [] if end.is_marked else [f"{name}: the archive has no end marker; its writer did not close it"]
    if len(expected) != len(offsets):
        return [*facts, f"{name}: {len(expected) - 1} samples, the index has {len(offsets) - 1}"]
    wrong = np.flatnonzero(expected != offsets)
    if len(wrong):
        index = int(wrong[0])
        return [*facts, f"{name}: sample {index} begins at {expected[index]}, the index has {offsets[index]}"]
    table = _field_table(found)[0]
    stored = folder / fields_name(name)
    if table is not None and stored.is_file() and not np.array_equal(np.load(stored), table):
        facts.append(f"{name}: the byte ranges of its fields differ from {stored.name}")
    return facts


def _known(meta: Path) -> dict[str, ShardFacts]:
    known = read_facts(meta.parent)
    log = meta / _PROGRESS_FILE
    for line in log.read_text().splitlines() if log.is_file() else []:
        try:
            value = json.loads(line)
            known[value["shard"]] = ShardFacts.of_plain(value)
        except (ValueError, KeyError, TypeError):
            continue  # the line that a kill cut off
    return known


def _is_current(folder: Path, name: str, facts: ShardFacts) -> bool:
    state = FileState.of(folder / name)
    index = folder / f"{name}{energon.INDEX_SUFFIX}"
    return (
        (state.num_bytes, state.modified_ns) == (facts.num_bytes, facts.modified_ns)
        and index.is_file()
        and index.stat().st_size == 8 * (facts.num_samples + 1)
        and (facts.fields is None or (folder / fields_name(name)).is_file())
    )


def _indexed(
    folder: Path, names: Sequence[str], num_processes: int
) -> Iterator[tuple[str, ShardFacts, bool]]:
    if num_processes < 2 or len(names) < 2:
        yield from (_index_shard(folder, name) for name in names)
        return
    # forkserver: the calling process may have threads, of which a fork would inherit only the locks.
    context = get_context("forkserver")
    with ProcessPoolExecutor(min(num_processes, len(names)), mp_context=context) as pool:
        yield from pool.map(_index_shard, [folder] * len(names), names)


def _index_shard(folder: Path, name: str) -> tuple[str, ShardFacts, bool]:
    path = folder / name
    state = FileState.of(path)
    found, end = scan(path)
    table, fields = _field_table(found)
    offsets = np.array([sample.offset for sample in found] + [end.offset], dtype="<u8")
    if table is not None:
        target = folder / fields_name(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        with _replacing(target) as partial, partial.open("wb") as file:
            np.save(file, table)
    with _replacing(folder / f"{name}{energon.INDEX_SUFFIX}") as partial:
        partial.write_bytes(offsets.tobytes())
    if FileState.of(path) != state:
        raise DataError("the shard was changed while it was indexed", where=str(path), hint="index it again")
    facts = ShardFacts(state.num_bytes, state.modified_ns, sampled_hash(path), len(found), fields)
    return name, facts, end.is_marked


def _field_table(found: list[TarSample]) -> tuple[NDArray[np.int64] | None, tuple[str, ...] | None]:
    """Per sample: begin and end of its key in the first header, then of each field.

    There is none where samples differ in their fields, or where a key is in an extended header.
    """
    fields = tuple(part.field for part in found[0].parts)
    names = [(sample.key.encode(errors="surrogateescape"), sample) for sample in found]
    if len(set(fields)) < len(fields) or any(
        tuple(part.field for part in sample.parts) != fields
        or sample.parts[0].start != sample.offset + BLOCK
        or len(key) + 1 + len(fields[0]) > _NAME_BYTES
        for key, sample in names
    ):
        return None, None
    rows = [
        [sample.offset, sample.offset + len(key), *(at for part in sample.parts for at in part.range)]
        for key, sample in names
    ]
    return np.array(rows, dtype=np.int64), fields


def _write_sqlite(folder: Path, names: list[str]) -> None:
    ends = [int(read_offsets(folder / f"{name}{energon.INDEX_SUFFIX}")[-1]) for name in names]
    with _replacing(folder / energon.META_FOLDER / energon.SQLITE_FILE) as partial:
        energon.write_sqlite(partial, (scan(folder / name)[0] for name in names), ends)


def _write_meta(meta: Path, facts: dict[str, ShardFacts]) -> None:
    edited = _edited_files(meta)
    names = list(facts)
    shards = {name: each.plain() for name, each in facts.items()}
    texts = {
        FACTS_FILE: json.dumps({"version": 1, "shards": shards}, indent=1) + "\n",
        energon.UUID_FILE: energon.new_uuid(),
        energon.DATASET_FILE: energon.DATASET_TEXT,
        energon.SPLIT_FILE: energon.split_text(names),
        # Written last: a folder without it is not indexed.
        energon.INFO_FILE: json.dumps(
            {"shard_counts": {name: shards[name]["num_samples"] for name in names}}
        ),
    }
    for file, text in texts.items():
        if file in edited:
            continue
        with _replacing(meta / file) as partial:
            partial.write_text(text)
    (meta / _PROGRESS_FILE).unlink(missing_ok=True)


def _edited_files(meta: Path) -> set[str]:
    """The files that people may edit, where they are not as an earlier call wrote them."""
    before = {
        energon.DATASET_FILE: energon.DATASET_TEXT,
        energon.SPLIT_FILE: energon.split_text(list(read_facts(meta.parent))),
    }
    return {
        name for name, text in before.items() if (meta / name).is_file() and (meta / name).read_text() != text
    }


class _replacing:  # noqa: N801  used as a with statement
    """A path beside `target` that takes its name when the block succeeds."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._partial = target.with_name(f".{target.name}.{os.getpid()}.partial")

    def __enter__(self) -> Path:
        return self._partial

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self._partial.replace(self._target)
        else:
            self._partial.unlink(missing_ok=True)
