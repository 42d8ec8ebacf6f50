"""Packing on all cores: the dataset that one process packs, and a kill costs only the pieces in flight."""

import errno
import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshwright.data import pack_parts
from meshwright.data.pack import pack
from meshwright.data.pack_parts import job_folder, pack_in_parts, split_input, writing_parts
from meshwright.data.sources import TokenFile
from meshwright.data.text_input import KINDS, Piece, TextFormat, documents, find_files
from meshwright.data.tokenize import ByteTokenizer
from meshwright.errors import DataError

TEXTS = [f"line {number} " * (1 + number % 40) + "é" * (number % 3) for number in range(300)]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """One text in every kind of file."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
    (folder / "a.jsonl").write_bytes(lines)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines))
    import zstandard

    frames = [zstandard.compress(part) for part in (lines[:4000], lines[4000:])]  # as parallel writers do
    (folder / "c.jsonl.zst").write_bytes(b"".join(frames))
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), folder / "d.parquet", row_group_size=50)
    (folder / "e.txt").write_text(TEXTS[5])
    (folder / "f.txt.gz").write_bytes(gzip.compress(TEXTS[6].encode()))
    return folder


def test_every_kind_gives_the_same_texts(corpus: Path) -> None:
    files = find_files([corpus])
    assert [file.name for file in files] == sorted(path.name for path in corpus.iterdir())
    assert len(files) == 6 and all(file.name.endswith(KINDS) for file in files)
    for file in files[:4]:
        assert [each.text for each in documents([Piece(file)], TextFormat())] == TEXTS
    assert [each.text for each in documents([Piece(file) for file in files[4:]], TextFormat())] == TEXTS[5:7]


@pytest.mark.parametrize("piece_bytes", [40, 700, 5000, 10**9])
def test_pieces_of_lines_are_all_lines(corpus: Path, piece_bytes: int) -> None:
    units = split_input([corpus / "a.jsonl"], piece_bytes)
    texts = [each.text for unit in units for each in documents(unit, TextFormat())]
    assert texts == TEXTS


def test_all_cores_pack_what_one_packs(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack_parts, "PIECE_BYTES", 4000)
    monkeypatch.setattr(pack_parts.split_input, "__defaults__", (4000,))
    files, heard = find_files([corpus]), []
    one = pack(files, tmp_path / "one", tokenizer=ByteTokenizer())
    many = pack_in_parts(
        files, tmp_path / "many", tokenizer=ByteTokenizer(), num_processes=2, progress=heard.append
    )
    assert many.num_empty == one.num_empty
    assert many.manifest.sha256 == one.manifest.sha256
    assert many.manifest.document_tokens == one.manifest.document_tokens
    assert sum(heard) == sum(file.stat().st_size for file in files)
    assert TokenFile.open(tmp_path / "many").damage() == []
    assert {path.name for path in tmp_path.iterdir()} == {"corpus", "one", "many"}


KILLED = """
import os, signal, sys
from pathlib import Path
from typing import Any
from meshwright.data import pack_parts
from meshwright.data.tokenize import ByteTokenizer

if __name__ == "__main__":
    pack_parts.split_input.__defaults__ = (3000,)
    finished = []
    def progress(num_bytes):
        finished.append(num_bytes)
        if len(finished) == 4:
            os.kill(os.getpid(), signal.SIGKILL)
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    pack_parts.pack_in_parts(
        [source], target, tokenizer=ByteTokenizer(), num_processes=2, progress=progress)
"""


def test_a_kill_is_resumed(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "killed.py").write_text(KILLED)
    command = [sys.executable, str(tmp_path / "killed.py"), str(corpus / "a.jsonl"), str(tmp_path / "data")]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert not (tmp_path / "data").exists()
    finished = {path: path.stat().st_ino for path in (tmp_path / ".data.packing").glob("*.json")}
    assert len(finished) >= 4
    monkeypatch.setattr(pack_parts.split_input, "__defaults__", (3000,))
    seen: list[dict[Path, int]] = []
    pack_in_parts(
        [corpus / "a.jsonl"],
        tmp_path / "data",
        tokenizer=ByteTokenizer(),
        num_processes=2,
        progress=lambda _: seen.append({path: path.stat().st_ino for path in finished}),
    )
    assert seen[-1] == finished  # these parts were not packed twice
    pack([corpus / "a.jsonl"], tmp_path / "one", tokenizer=ByteTokenizer())
    assert TokenFile.open(tmp_path / "data").fingerprint == TokenFile.open(tmp_path / "one").fingerprint
    assert not (tmp_path / ".data.packing").exists()


def test_a_broken_line_in_a_later_piece_has_its_number(
    tmp_path: Path,
) -> None:
    good = json.dumps({"text": "word " * 20}) + "\n"
    (tmp_path / "a.jsonl").write_text(good * 70 + "{broken\n" + good * 30)
    for unit in split_input([tmp_path / "a.jsonl"], 1000):
        try:
            list(documents(unit, TextFormat()))
        except DataError as error:
            assert error.where == f"{tmp_path}/a.jsonl:71"
            break
    else:
        raise AssertionError("the broken line was not found")


@pytest.mark.parametrize(
    ("name", "content", "fact"),
    [
        ("a.jsonl.gz", b"no gzip", "cannot be read"),
        ("a.jsonl.zst", b"no zstd", "cannot be decompressed"),
        ("a.parquet", b"no parquet", "cannot be read"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 100)[:-20], "cannot be read"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 100)[:12] + b"\xff" * 40, "cannot be read"),
    ],
    ids=[
        "no gzip",
        "no zstd",
        "no parquet",
        "truncated gzip",
        "damaged gzip",
    ],  # compressed bytes hold the time of day
)
def test_damaged_compressed_files_are_named(tmp_path: Path, name: str, content: bytes, fact: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=fact) as caught:
        pack([tmp_path / name], tmp_path / "data", tokenizer=ByteTokenizer())
    assert caught.value.where.startswith(str(tmp_path / name))
    assert not (tmp_path / "data").exists()


def test_a_missing_column_is_named(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no column 'body'") as caught:
        pack(
            [corpus / "d.parquet"],
            tmp_path / "x",
            tokenizer=ByteTokenizer(),
            text_format=TextFormat(text_field="body"),
        )
    assert "the columns are text" in caught.value.hint


WORKER = """
import os, time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from meshwright.data.pack_parts import end_with_parent

if __name__ == "__main__":
    pool = ProcessPoolExecutor(1, get_context("forkserver"), end_with_parent)
    print(pool.submit(os.getpid).result(), flush=True)
    pool.submit(time.sleep, 300).result()
"""


def test_a_worker_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """It would write its part into the folder of a later call."""
    (tmp_path / "main.py").write_text(WORKER)
    command = [sys.executable, str(tmp_path / "main.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and int(process.stdout.readline())
        process.kill()
        process.communicate(timeout=60)  # the pipe is open as long as a worker has it


def test_a_full_disk_is_no_fault(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No space left") as refused, writing_parts(tmp_path / ".x.packing"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert refused.value.where == str(tmp_path)
    with pytest.raises(FileNotFoundError), writing_parts(tmp_path / ".x.packing"):
        (tmp_path / "input.jsonl").read_bytes()


def test_one_process_packs_a_dataset_at_a_time(corpus: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"tokenizer": ByteTokenizer(), "num_processes": 1}
    with job_folder(tmp_path / ".data.packing", ["the settings of another call"]):
        with pytest.raises(DataError, match="another process is packing"):
            pack_in_parts([corpus / "a.jsonl"], tmp_path / "data", **options)
        assert not (tmp_path / "data").exists()
    assert pack_in_parts([corpus / "a.jsonl"], tmp_path / "data", **options).manifest.num_documents
