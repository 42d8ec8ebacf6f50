"""Arrow files, and Hugging Face datasets on disk (`save_to_disk`), memory-mapped."""

import hashlib
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import Any

from meshwright.data.file_check import damaged
from meshwright.data.readers.arrow_rows import row_of
from meshwright.data.readers.extras import package
from meshwright.data.readers.file_list import FileList, files_with
from meshwright.data.records import KEY, Record
from meshwright.errors import DataError
from meshwright.files import MIB, read_json_file

SUFFIX, STATE_FILE, SPLITS_FILE = ".arrow", "state.json", "dataset_dict.json"


class ArrowRows:
    """The rows of Arrow files (stream or file format), or of a dataset that `datasets` saved."""

    def __init__(self, path: Path | str, *, split: str | None = None) -> None:
        self.name, self._split = str(path), split
        folder = _split_folder(Path(path), split)
        state = _saved_state(folder)
        paths = [folder / name for name in state["data"]] if state else files_with(folder, SUFFIX)
        batches = [_batches(each) for each in paths]
        self._batches = [batch for each in batches for batch in each]
        self._starts = [0, *accumulate(batch.num_rows for batch in self._batches)]
        self._list = FileList(paths, [sum(batch.num_rows for batch in each) for each in batches])
        self._order = _indices([folder / name for name in state["indices"]]) if state else None

    @property
    def fingerprint(self) -> str:
        """A hash of samples of the files, and of the selection of rows where there is one."""
        if self._order is None:
            return self._list.fingerprint
        content = self._list.fingerprint.encode() + self._order.tobytes()
        return hashlib.sha256(content).hexdigest()[:16]

    def __len__(self) -> int:
        return len(self._list) if self._order is None else len(self._order)

    def record(self, index: int) -> Record:
        """The row at `index`; its key is the index where there is no column `__key__`."""
        batch, row = self._find(index)
        return {KEY: str(index), **row_of(batch, row)}

    def values(self, index: int) -> dict[str, Any]:
        """The row at `index` as plain Python values: lists and objects stay nested."""
        batch, row = self._find(index)
        return batch.slice(row, 1).to_pylist()[0]

    def _find(self, index: int) -> tuple[Any, int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        row = index if self._order is None else int(self._order[index])
        batch = bisect_right(self._starts, row) - 1
        return self._batches[batch], row - self._starts[batch]

    def lengths(self) -> None:
        """None: the size of a row is not known without reading it."""
        return

    def require_unchanged(self) -> None:
        """DataError where a file was changed since it was opened."""
        self._list.require_unchanged()

    def __reduce__(self) -> tuple[object, ...]:
        return _reopened, (self.name, self._split)


def _split_folder(path: Path, split: str | None) -> Path:
    listing = path / SPLITS_FILE
    if not listing.is_file():
        if split is not None:
            raise DataError("the dataset has no splits", where=str(path), hint="leave out the split")
        return path
    splits = _json(listing).get("splits")
    names = [str(name) for name in splits] if isinstance(splits, list) else []
    if split not in names:
        fact = f"there is no split {split!r}" if split else "the dataset has splits, and none is chosen"
        hint = f"name one of {', '.join(names)} (`data pack --dataset-split`)"
        raise DataError(fact, where=str(path), hint=hint)
    return path / split


def _saved_state(folder: Path) -> dict[str, list[str]] | None:
    """The names of the data files and of the files with a selection of rows; None for plain Arrow files."""
    path = folder / STATE_FILE
    if not path.is_file():
        return None
    state = _json(path)
    if state.get("_data_files") == []:
        raise DataError("the dataset has no rows", where=str(folder), hint="save one that has rows")
    entries = {kind: state.get(f"_{kind}_files") or [] for kind in ("data", "indices")}
    try:
        names = {kind: [str(each["filename"]) for each in found] for kind, found in entries.items()}
    except (TypeError, KeyError):
        names = {"data": list[str]()}
    if not names["data"] or any("/" in name for each in names.values() for name in each):
        raise damaged(path, "the file names no data files of this folder")
    return names


def _json(path: Path) -> dict[str, Any]:
    try:
        value = read_json_file(path, max_bytes=64 * MIB)
    except (OSError, ValueError) as error:
        raise damaged(path, f"the file cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise damaged(path, "the file holds no JSON object")
    return value


def _batches(path: Path) -> list[Any]:
    arrow = package("pyarrow", extra="parquet", needed_for="Arrow files")
    try:
        mapped = arrow.memory_map(str(path))
        try:
            return arrow.ipc.open_stream(mapped).read_all().to_batches()
        except arrow.ArrowInvalid:
            mapped.seek(0)
            return arrow.ipc.open_file(mapped).read_all().to_batches()
    except (OSError, ValueError) as error:
        fact = f"the file is no complete Arrow file: {str(error).splitlines()[0]}"
        raise DataError(fact, where=str(path), hint="write the file again") from None


def _indices(paths: list[Path]) -> Any:
    if not paths:
        return None
    arrow = package("pyarrow", extra="parquet", needed_for="Arrow files")
    batches = [batch.column(0) for path in paths for batch in _batches(path)]
    return arrow.chunked_array(batches).to_numpy()


def _reopened(name: str, split: str | None) -> ArrowRows:
    return ArrowRows(name, split=split)
