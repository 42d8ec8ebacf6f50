"""Packing: documents keep their ends, and a dataset is complete or not there."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from tests.support.soak import examples

from meshwright.data import pack as packing
from meshwright.data import text_input
from meshwright.data.pack import pack
from meshwright.data.sources import TokenFile
from meshwright.data.text_input import TextFormat, find_files
from meshwright.data.tokenize import ByteTokenizer
from meshwright.errors import DataError


def pack_bytes(folder: Path, *files: Path, **options: str) -> list[str]:
    """Pack with the byte tokenizer and read every document back."""
    pack(files, folder, tokenizer=ByteTokenizer(), text_format=TextFormat(**options))
    dataset = TokenFile.open(folder)
    assert dataset.damage() == []
    return [
        ByteTokenizer().decode(dataset.document(i).tolist()) for i in range(dataset.manifest.num_documents)
    ]


def test_a_text_file_is_a_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    (tmp_path / "b.txt").write_text("três")
    assert pack_bytes(tmp_path / "data", tmp_path / "a.txt", tmp_path / "b.txt") == ["one\n\ntwo\n", "três"]


def test_blank_lines_separate_documents_when_asked(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n\none\nmore\n \t\n\ntwo\n\n")
    assert pack_bytes(tmp_path / "data", tmp_path / "a.txt", split="blank-line") == ["one\nmore\n", "two\n"]


def test_json_lines_are_documents(tmp_path: Path) -> None:
    lines = [{"content": "one\n\ntwo"}, {"content": ""}, {"content": "három", "n": 3}]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    assert pack_bytes(tmp_path / "data", tmp_path / "a.jsonl", text_field="content") == [
        "one\n\ntwo",
        "három",
    ]


@examples(8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.text(), min_size=1))
def test_any_texts_come_back(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    folder = tmp_path_factory.mktemp("pack")
    (folder / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in [*texts, "end"]))
    assert pack_bytes(folder / "data", folder / "a.jsonl") == [text for text in [*texts, "end"] if text]


def test_half_a_character_becomes_a_question_mark(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800b"}')  # legal JSON, and no UTF-8 text
    assert pack_bytes(tmp_path / "data", tmp_path / "a.jsonl") == ["a?b"]


def test_documents_come_back_whatever_the_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"document {index} " * (index % 7) for index in range(1, 60) if index % 7]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    assert pack_bytes(tmp_path / "once", tmp_path / "a.jsonl") == texts
    monkeypatch.setattr(packing, "_GROUP_BYTES", 50)
    assert pack_bytes(tmp_path / "often", tmp_path / "a.jsonl") == texts
    once, often = TokenFile.open(tmp_path / "once"), TokenFile.open(tmp_path / "often")
    assert once.fingerprint == often.fingerprint


def test_progress_hears_of_every_byte(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n' * 10)
    heard: list[int] = []
    pack([tmp_path / "a.jsonl"], tmp_path / "data", tokenizer=ByteTokenizer(), progress=heard.append)
    assert sum(heard) == (tmp_path / "a.jsonl").stat().st_size


def test_folders_are_searched_in_the_order_of_names(tmp_path: Path) -> None:
    for name in ("b/2.txt", "b/1.jsonl", "a/x.txt", "a/skip.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    found = [str(file.relative_to(tmp_path)) for file in find_files([tmp_path])]
    assert found == ["a/x.txt", "b/1.jsonl", "b/2.txt"]


@pytest.mark.parametrize(
    ("name", "content", "fact", "where"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', "the line is not JSON", "a.jsonl:2"),
        ("a.jsonl", b'\n["x"]', "is a JSON list, not an object", "a.jsonl:2"),
        ("a.jsonl", b'{"body": "x"}', "has no field 'text'", "a.jsonl:1"),
        ("a.jsonl", b'{"text": 5}', "field 'text' is 5, not text", "a.jsonl:1"),
        ("a.jsonl", b'{"text": "\xff"}', "the line is not JSON", "a.jsonl:1"),
        ("a.jsonl", b"[" * 100_000, "the line is not JSON", "a.jsonl:1"),
        ("a.txt", b"fine \xff", "not UTF-8: byte 0xff after 5 bytes", "a.txt"),
        ("a.txt", b"", "1 file without any text", "a.txt"),
    ],
)
def test_bad_input_is_a_fact_and_leaves_nothing(
    tmp_path: Path, name: str, content: bytes, fact: str, where: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=fact) as caught:
        pack([tmp_path / name], tmp_path / "data", tokenizer=ByteTokenizer())
    assert caught.value.where.endswith(where)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ["missing.txt", "empty", "picture.png"])
def test_paths_without_text_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "picture.png").write_bytes(b"png")
    with pytest.raises(DataError) as caught:
        find_files([tmp_path / name])
    assert caught.value.where == str(tmp_path / name)


def test_a_huge_document_is_refused_before_it_fills_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_input, "MAX_DOCUMENT_BYTES", 100)
    (tmp_path / "a.txt").write_text("word\n" * 100)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "word " * 100}))
    for name, split in (("a.txt", "file"), ("a.txt", "blank-line"), ("a.jsonl", "file")):
        with pytest.raises(DataError, match="one document is larger than"):
            pack_bytes(tmp_path / "data", tmp_path / name, split=split)


@pytest.mark.parametrize("kind", ["dataset", "file", "empty folder", "dangling link"])
def test_nothing_is_overwritten(tmp_path: Path, kind: str) -> None:
    (tmp_path / "a.txt").write_text("new")
    target = tmp_path / "data"
    if kind == "dataset":
        pack([tmp_path / "a.txt"], target, tokenizer=ByteTokenizer())
    elif kind == "file":
        target.write_text("precious")
    elif kind == "empty folder":
        target.mkdir()
    else:
        target.symlink_to(tmp_path / "nowhere")
    before = sorted((path, path.is_file() and path.read_bytes()) for path in tmp_path.rglob("*"))
    with pytest.raises(DataError, match="never overwritten"):
        pack([tmp_path / "a.txt"], target, tokenizer=ByteTokenizer())
    assert sorted((path, path.is_file() and path.read_bytes()) for path in tmp_path.rglob("*")) == before


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")

    def interrupt(num_bytes: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack([tmp_path / "a.txt"], tmp_path / "data", tokenizer=ByteTokenizer(), progress=interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


KILLED = """
import os, signal, sys
from pathlib import Path
from meshwright.data import pack, write
from meshwright.data.tokenize import ByteTokenizer

folder, moment = Path(sys.argv[1]), sys.argv[2]
def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)
if moment == "while reading":
    progress = die
else:
    progress = lambda num_bytes: None
    setattr(write, {"before the manifest": "Manifest", "before the rename": "_publish"}[moment], die)
pack.pack([folder / "a.txt"], folder / "data", tokenizer=ByteTokenizer(), progress=progress)
"""


@pytest.mark.parametrize("moment", ["while reading", "before the manifest", "before the rename"])
def test_a_kill_leaves_nothing_that_looks_complete(tmp_path: Path, moment: str) -> None:
    (tmp_path / "a.txt").write_text("some text")
    command = [sys.executable, "-c", KILLED, str(tmp_path), moment]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert not (tmp_path / "data").exists()
    with pytest.raises(DataError, match="no dataset here"):
        TokenFile.open(tmp_path / "data")
    leftovers = [path for path in tmp_path.iterdir() if path.name != "a.txt"]
    assert all(path.name.startswith(".data.partial-") for path in leftovers)
    assert pack_bytes(tmp_path / "data", tmp_path / "a.txt") == ["some text"]


def test_an_unwritable_place_is_a_fact(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError, match="cannot be written"):
        pack([tmp_path / "a.txt"], tmp_path / "a.txt" / "data", tokenizer=ByteTokenizer())


def test_a_dataset_is_as_readable_as_any_new_folder(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    pack([tmp_path / "a.txt"], tmp_path / "data", tokenizer=ByteTokenizer())
    mask = os.umask(0)
    os.umask(mask)
    assert (tmp_path / "data").stat().st_mode & 0o777 == 0o777 & ~mask


def test_tokens_are_stored_in_the_smallest_type(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    pack([tmp_path / "a.txt"], tmp_path / "data", tokenizer=ByteTokenizer())
    assert np.fromfile(tmp_path / "data" / "tokens.bin", dtype=np.uint16).tolist() == [*b"text", 256]
    assert np.fromfile(tmp_path / "data" / "documents.bin", dtype=np.int64).tolist() == [5]
