"""Packing on all cores: worker processes tokenize pieces of the input, which are joined in order at the end.

Finished pieces are files in a hidden folder beside the dataset, `.NAME.packing`. After a kill, the same
command finds them and tokenizes only the rest. Pieces of other input, or of another tokenizer, are not used.
"""

import fcntl
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meshwright.data.pack import Packed, groups, require_documents
from meshwright.data.sources import token_dtype
from meshwright.data.text_input import JSON_LINES, Piece, TextFormat, documents
from meshwright.data.tokenize import HuggingFaceTokenizer, Tokenizer, open_tokenizer
from meshwright.data.write import new_dataset, require_absent
from meshwright.errors import DataError

PIECE_BYTES = 32 << 20
_COPY_BYTES = 1 << 24


class _Part(NamedTuple):
    num_empty: int
    num_bytes: int


class _Job(NamedTuple):
    """What a worker needs to know, besides its piece."""

    folder: Path
    text_format: TextFormat
    tokenizer_name: str
    eos: str | None


def pack_in_parts(
    files: Sequence[Path],
    folder: Path,
    *,
    tokenizer: Tokenizer,
    num_processes: int,
    text_format: TextFormat | None = None,
    progress: Callable[[int], object] = lambda num_bytes: None,
) -> Packed:
    """Tokenize the documents of `files` into a new dataset on `num_processes` cores.

    The result is the same, byte for byte, as that of `pack`.
    """
    require_absent(folder)
    text_format = text_format or TextFormat()
    units = split_input(files)
    hidden = folder.with_name(f".{folder.name}.packing")
    name, eos = _reopening(tokenizer)
    with job_folder(hidden, _facts(files, tokenizer, text_format)):
        with writing_parts(hidden):
            parts = _tokenized(_Job(hidden, text_format, name, eos), units, num_processes, progress)
        with new_dataset(folder, tokenizer) as writer:
            for number in range(len(units)):
                lengths = np.fromfile(hidden / f"{number}.lengths", dtype=np.int64)
                writer.append_encoded(_chunks(hidden / f"{number}.tokens"), lengths)
            require_documents(writer.num_documents, files)
            manifest = writer.finish([str(file) for file in files])
        shutil.rmtree(hidden, ignore_errors=True)
    return Packed(manifest, sum(part.num_empty for part in parts))


def split_input(files: Sequence[Path], piece_bytes: int = PIECE_BYTES) -> list[tuple[Piece, ...]]:
    """Units of work: byte ranges of large .jsonl files, other large files alone, small files together."""
    units: list[tuple[Piece, ...]] = []
    small: list[Piece] = []
    for path in files:
        size = path.stat().st_size
        if size >= piece_bytes:
            if small:
                units.append(tuple(small))
                small = []
            step = piece_bytes if path.suffix == JSON_LINES else size
            units += [(Piece(path, at, min(at + step, size)),) for at in range(0, size, step)]
            continue
        small.append(Piece(path))
        if sum(piece.num_bytes for piece in small) >= piece_bytes or len(small) >= 1000:
            units.append(tuple(small))
            small = []
    return units + ([tuple(small)] if small else [])


def _facts(files: Sequence[Path], tokenizer: Tokenizer, text_format: TextFormat) -> list[Any]:
    states = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return [states, tokenizer.hash, tokenizer.eos_id, asdict(text_format), PIECE_BYTES]


@contextmanager
def job_folder(hidden: Path, facts: Sequence[Any]) -> Iterator[None]:
    """The folder of parts, new or of an earlier call with the same input and settings; DataError while
    another process has it: two that write the same parts would damage the dataset.
    """
    try:
        hidden.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(hidden, os.O_RDONLY)
    except OSError as error:
        raise _unwritable(hidden, error) from error
    try:
        _lock(descriptor, hidden)
        _begin(hidden, hashlib.sha256(json.dumps(facts).encode()).hexdigest())
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, hidden: Path) -> None:
    """Lock the folder; the lock ends with the process, however that ends."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        hint = "wait for it, or name another folder with -o"
        raise DataError("another process is packing this dataset", where=str(hidden), hint=hint) from None
    except OSError:  # a file system without locks
        return


def _begin(hidden: Path, digest: str) -> None:
    mark = hidden / "job"
    try:
        if mark.is_file() and mark.read_text() == digest:
            return
        for part in hidden.iterdir():  # the folder itself is locked, and stays
            part.unlink()
        mark.write_text(digest)
    except OSError as error:
        raise _unwritable(hidden, error) from error


def _unwritable(hidden: Path, error: OSError) -> DataError:
    hint = "free disk space, or name another folder with -o"
    fact = f"the dataset cannot be written: {error.strerror or error}"
    return DataError(fact, where=str(hidden.parent), hint=hint)


@contextmanager
def writing_parts(hidden: Path) -> Iterator[None]:
    """DataError where a part cannot be written, such as on a full disk, or its worker is killed.

    The parts before it stay.
    """
    try:
        yield
    except BrokenProcessPool as error:
        hint = "often memory ran out: the same command with fewer --processes continues"
        raise DataError("a worker process was killed", where=str(hidden.parent), hint=hint) from error
    except OSError as error:
        if error.filename is not None:  # a file of the input
            raise
        hint = "free disk space; the same command then continues"
        fact = f"the dataset cannot be written: {error.strerror or error}"
        raise DataError(fact, where=str(hidden.parent), hint=hint) from error


def end_with_parent() -> None:
    """End this worker process when the one that started it is gone: a later call may have other settings."""
    parent = parent_process()
    if parent is not None:
        threading.Thread(target=_end_after, args=[parent], daemon=True).start()


def _end_after(parent: Any) -> None:
    parent.join()
    os._exit(1)


def _reopening(tokenizer: Tokenizer) -> tuple[str, str | None]:
    """Name and end-of-document token with which a worker opens the same tokenizer."""
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return str(tokenizer.path), tokenizer.token(tokenizer.eos_id)
    return tokenizer.name, None


def _tokenized(
    job: _Job, units: Sequence[tuple[Piece, ...]], num_processes: int, progress: Callable[[int], object]
) -> list[_Part]:
    done = {
        number: part for number in range(len(units)) if (part := _finished(job.folder, number)) is not None
    }
    for part in done.values():
        progress(part.num_bytes)
    left = [number for number in range(len(units)) if number not in done]
    # forkserver: the calling process may have threads, of which a fork would inherit only the locks.
    context = get_context("forkserver")
    with ProcessPoolExecutor(min(num_processes, max(1, len(left))), context, _open_job, (job,)) as pool:
        running = {pool.submit(_tokenize, job.folder, number, units[number]): number for number in left}
        try:
            for future in as_completed(running):
                done[running[future]] = future.result()
                progress(done[running[future]].num_bytes)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [done[number] for number in range(len(units))]


class _Worker:
    """What a worker process keeps between its pieces."""

    job: _Job
    tokenizer: Tokenizer


def _open_job(job: _Job) -> None:
    end_with_parent()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core for each process, not all for each
    _Worker.job = job
    _Worker.tokenizer = open_tokenizer(job.tokenizer_name, eos=job.eos)


def _tokenize(folder: Path, number: int, pieces: tuple[Piece, ...]) -> _Part:
    tokenizer = _Worker.tokenizer
    dtype = token_dtype(tokenizer.vocab_size)
    eos = np.array([tokenizer.eos_id], dtype=dtype)
    num_empty, lengths = 0, []
    with (folder / f"{number}.partial").open("wb") as file:
        for group in groups(documents(pieces, _Worker.job.text_format)):
            texts = [document.text for document in group if document.text]
            num_empty += len(group) - len(texts)
            for tokens in tokenizer.encode(texts) if texts else []:
                file.write(tokens.astype(dtype).tobytes())
                file.write(eos.tobytes())
                lengths.append(len(tokens) + 1)
    part = _Part(num_empty, sum(piece.num_bytes for piece in pieces))
    (folder / f"{number}.partial").rename(folder / f"{number}.tokens")
    np.array(lengths, dtype=np.int64).tofile(folder / f"{number}.lengths")
    (folder / f"{number}.json.partial").write_text(json.dumps(part))
    (folder / f"{number}.json.partial").rename(folder / f"{number}.json")  # last: the part is complete
    return part


def _finished(folder: Path, number: int) -> _Part | None:
    try:
        return _Part(*json.loads((folder / f"{number}.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _chunks(path: Path) -> Iterable[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_COPY_BYTES):
            yield chunk
