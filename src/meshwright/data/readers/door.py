"""`open_source`: recognises the format of a path or an address, and opens it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from meshwright.data.readers import arrow, energon, folder, hdf5, json_lines, lmdb, megatron, parquet, tar
from meshwright.data.readers.documents import TokenDocuments
from meshwright.data.readers.megatron_objects import MegatronObjects
from meshwright.data.readers.object_store import StoreOptions, is_address
from meshwright.data.readers.places import RemotePlace, fetch_all
from meshwright.data.readers.tar_index import TAR_SUFFIX
from meshwright.data.records import RecordSource
from meshwright.data.sources import MANIFEST_FILE, TokenFile
from meshwright.errors import DataError

# Of a folder, only so many names are looked at to recognise its format.
_MAX_NAMES = 2000


class Opened(NamedTuple):
    """A source, and the name of its format."""

    source: RecordSource
    kind: str


@dataclass(frozen=True)
class _Format:
    kind: str
    matches: Callable[[Path], bool]
    open: Callable[[Path, str | None], RecordSource]
    has_splits: bool = False


def open_source(
    path: Path | str, *, split: str | None = None, store: StoreOptions | None = None
) -> RecordSource:
    """The records at a path or an address, whatever their format; DataError says what was found instead.

    `split` chooses a split of a dataset that has some (tar shards, Hugging Face datasets).
    """
    return open_and_name(path, split=split, store=store).source


def open_and_name(path: Path | str, *, split: str | None = None, store: StoreOptions | None = None) -> Opened:
    """The records at a path or an address, with the name of the format."""
    if is_address(str(path)):
        return _open_remote(str(path), split, store)
    local = Path(path)
    if not local.exists() and not megatron.pair_of(local)[1].is_file():
        raise DataError("there is no such file or folder", where=str(path), hint="check the path")
    for each in _FORMATS:
        if each.matches(local):
            if split is not None and not each.has_splits:
                raise DataError(f"{each.kind} have no splits", where=str(path), hint="leave out the split")
            return Opened(each.open(local, split), each.kind)
    raise DataError(_nothing_known(local), where=str(path), hint=_KNOWN)


def format_of(path: Path) -> str | None:
    """The name of the format at a local path; None where it is not recognised."""
    return next((each.kind for each in _FORMATS if each.matches(path)), None)


def _open_remote(address: str, split: str | None, options: StoreOptions | None) -> Opened:
    """Indexed tar shards, parquet and Megatron pairs are read in ranges; other files are copied first."""
    place = RemotePlace(address, options)
    if (pair := _remote_pair(address, options)) is not None:
        return Opened(pair, "Megatron tokens")
    if place.exists(f"{energon.META_FOLDER}/{energon.INFO_FILE}"):
        return Opened(tar.TarShards(place, split=split), "tar shards")
    names = place.store.below(address)
    if not names:
        raise DataError("there is no object below this address", where=address, hint="check the address")
    if any(name.endswith(TAR_SUFFIX) for name in names):
        hint = "index the shards where they are on a disk, and copy `.nv-meta` and the .idx files with them"
        raise DataError("the tar shards have no index", where=address, hint=hint)
    if split is None and all(name.endswith(parquet.SUFFIX) for name in names):
        return Opened(parquet.ParquetRows(place), "parquet rows")
    return open_and_name(fetch_all(place, names), split=split)


def _remote_pair(address: str, options: StoreOptions | None) -> RecordSource | None:
    """The Megatron pair with this prefix; None where there is none."""
    folder, _, prefix = address.rstrip("/").rpartition("/")
    if folder.endswith("/") or "://" not in folder:
        return None  # the address of a bucket
    place = RemotePlace(folder, options)
    if not all(place.exists(prefix + ending) for ending in (megatron.BIN_SUFFIX, megatron.IDX_SUFFIX)):
        return None
    return MegatronObjects(place, prefix)


def _names_in(path: Path) -> list[str]:
    """Names of files below a folder, some of them where there are many."""
    found: list[str] = []
    for file in path.rglob("*"):
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts):
            found.append(file.name)
            if len(found) >= _MAX_NAMES:
                break
    return found


def _holds(path: Path, *suffixes: str) -> bool:
    """Whether a path is such a file, or a folder of such files and no others of note."""
    if path.is_file():
        return path.name.endswith(suffixes)
    names = _names_in(path)
    return bool(names) and sum(name.endswith(suffixes) for name in names) > len(names) // 2


def _is_tar(path: Path) -> bool:
    return _holds(path, TAR_SUFFIX, f"{TAR_SUFFIX}{energon.INDEX_SUFFIX}") or _is_prepared(path)


def _is_prepared(path: Path) -> bool:
    return (path / energon.META_FOLDER / energon.INFO_FILE).is_file()


def _open_tar(path: Path, split: str | None) -> RecordSource:
    root = path if path.is_dir() else _indexed_root(path)
    if root is None or not _is_prepared(root):
        hint = f"run `meshwright data index {path if path.is_dir() else path.parent}` once"
        raise DataError(
            "the tar shards have no index, so they have no random access", where=str(path), hint=hint
        )
    return tar.TarShards(root, split=split, shard=None if path.is_dir() else str(path.relative_to(root)))


def _indexed_root(path: Path) -> Path | None:
    return next((parent for parent in path.parents if _is_prepared(parent)), None)


def _is_megatron(path: Path) -> bool:
    prefix = _megatron_prefix(path)
    return all(each.is_file() for each in megatron.pair_of(prefix))


def _megatron_prefix(path: Path) -> Path:
    return path.with_suffix("") if path.suffix in (megatron.BIN_SUFFIX, megatron.IDX_SUFFIX) else path


def _is_lmdb(path: Path) -> bool:
    return path.suffix in (".lmdb", ".mdb") or (path / lmdb.DATA_FILE).is_file()


def _is_arrow(path: Path) -> bool:
    listings = (arrow.STATE_FILE, arrow.SPLITS_FILE)
    return any((path / name).is_file() for name in listings) or _holds(path, arrow.SUFFIX)


def _is_folder_of_files(path: Path) -> bool:
    return path.is_dir() and any("." in name for name in _names_in(path))


_FORMATS = (
    _Format(
        "packed tokens",
        lambda path: (path / MANIFEST_FILE).is_file(),
        lambda path, _: TokenDocuments(TokenFile.open(path)),
    ),
    _Format("Megatron tokens", _is_megatron, lambda path, _: megatron.MegatronTokens(_megatron_prefix(path))),
    _Format("tar shards", _is_tar, _open_tar, has_splits=True),
    _Format("Arrow rows", _is_arrow, lambda path, split: arrow.ArrowRows(path, split=split), has_splits=True),
    _Format("LMDB entries", _is_lmdb, lambda path, _: lmdb.LmdbRecords(path)),
    _Format(
        "parquet rows", lambda path: _holds(path, parquet.SUFFIX), lambda path, _: parquet.ParquetRows(path)
    ),
    _Format("HDF5 rows", lambda path: _holds(path, *hdf5.SUFFIXES), lambda path, _: hdf5.Hdf5Rows(path)),
    _Format(
        "JSON lines",
        lambda path: _holds(path, json_lines.SUFFIX, json_lines.INDEX_SUFFIX),
        lambda path, _: json_lines.JsonLines(path),
    ),
    _Format("files of a folder", _is_folder_of_files, lambda path, _: folder.FolderFiles(path)),
)
_KNOWN = (
    "known are packed tokens, Megatron .bin/.idx, indexed .tar, .arrow, LMDB, .parquet, .h5, .jsonl, and "
    "folders of files; text is packed first: `meshwright data pack`"
)


def _nothing_known(path: Path) -> str:
    if path.is_file():
        return f"a file that ends with {path.suffix or 'nothing'} is no known format of records"
    return "the folder holds no file of a known format"
