"""Input that cannot be packed is refused with its place; what a kill or a full disk interrupts continues."""

import datetime
import errno
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.support.chat_packing import chats, pack, write_lines
from tests.support.chat_templates import FAMILIES, write_tokenizer

from meshwright.data.chat import pack as packing
from meshwright.data.chat.job import ChatCounts, ChatJob
from meshwright.data.chat.rows import find_chats
from meshwright.data.pack_parts import job_folder
from meshwright.data.sources import TokenFile
from meshwright.errors import DataError

QWEN = next(family for family in FAMILIES if family.name == "qwen-2.5")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), QWEN, template=QWEN.template)


def test_bad_records_are_left_out_up_to_a_number(tmp_path: Path, tokenizer: Path) -> None:
    bad = [{"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": ""}]}] * 2
    path = write_lines(tmp_path / "a.jsonl", chats(3) + bad)
    with pytest.raises(DataError, match="the answer is empty"):
        pack(path, tmp_path / "data", tokenizer)
    with pytest.raises(DataError, match="2 records are bad, and 1 are allowed"):
        pack(path, tmp_path / "data", tokenizer, max_bad=1)
    packed = pack(path, tmp_path / "data", tokenizer, max_bad=2)
    assert packed.counts.num_samples == 3
    write_lines(path, bad)
    with pytest.raises(DataError, match="every record is bad; the first: the answer is empty"):
        pack(path, tmp_path / "none", tokenizer, max_bad=2)
    assert [where for _, where, _ in packed.counts.bad] == [
        f"{path}:{line}, turn 2 (assistant)" for line in (4, 5)
    ]


def test_lines_that_are_no_records_are_bad_records(tmp_path: Path, tokenizer: Path) -> None:
    lines = [json.dumps(chats(1)[0]), "{", "[1]", '"text"']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with pytest.raises(DataError, match="3 records are bad, and 2 are allowed"):
        pack(tmp_path / "a.jsonl", tmp_path / "data", tokenizer, max_bad=2)
    packed = pack(tmp_path / "a.jsonl", tmp_path / "data", tokenizer, max_bad=3)
    assert packed.counts.num_samples == 1
    assert [where for _, where, _ in packed.counts.bad] == [
        f"{tmp_path}/a.jsonl:{line}" for line in (2, 3, 4)
    ]


def test_a_full_disk_keeps_the_parts(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_lines(tmp_path / "a.jsonl", chats())
    monkeypatch.setattr(packing, "PIECE_BYTES", 1500)
    encode_unit = packing._Worker.encode_unit

    def full(worker: packing._Worker, number: int, *rest: Any) -> ChatCounts:
        if number == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return encode_unit(worker, number, *rest)

    monkeypatch.setattr(packing._Worker, "encode_unit", full)
    with pytest.raises(DataError, match="No space left") as refused:
        pack(path, tmp_path / "data", tokenizer)
    assert "the same command then continues" in refused.value.hint
    assert (tmp_path / ".data.packing" / "1.json").is_file()
    monkeypatch.undo()
    monkeypatch.setattr(packing, "PIECE_BYTES", 1500)
    assert pack(path, tmp_path / "data", tokenizer).counts.num_samples == 40


@pytest.mark.parametrize("template", [None, "{% for %}", "{{ raise_exception('stop') }}"])
def test_without_a_usable_template_nothing_is_written(template: str | None, tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer", QWEN, template=template)
    path = write_lines(tmp_path / "a.jsonl", chats(2))
    with pytest.raises(DataError, match=r"no chat template|no valid Jinja|refuses the messages: stop"):
        pack(path, tmp_path / "data", folder)
    assert not (tmp_path / "data").exists()


def test_an_empty_file_is_refused(tmp_path: Path, tokenizer: Path) -> None:
    with pytest.raises(DataError, match="there is no record"):
        pack(write_lines(tmp_path / "a.jsonl", []), tmp_path / "data", tokenizer)


def test_input_without_chats_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError, match="no records of chats"):
        find_chats([tmp_path / "a.txt"], split=None)
    with pytest.raises(DataError, match="split has no effect"):
        find_chats([write_lines(tmp_path / "a.jsonl", chats(1))], split="train")
    (tmp_path / "a.json").write_text("{}")
    files = find_chats([tmp_path / "a.json"], split=None)
    with pytest.raises(DataError, match="no JSON list"):
        list(files.rows(files.pieces(100)[0]))


@pytest.mark.parametrize("depth", [100, 700, 2000, 100_000])
def test_a_record_that_is_nested_too_deeply_is_a_bad_record(
    depth: int, tmp_path: Path, tokenizer: Path
) -> None:
    """Some depths are too much for JSON already, others for what reads the record."""
    path = write_lines(tmp_path / "a.jsonl", chats(2))
    nested = '{"messages": [{"meta": ' + "[" * depth + "]" * depth
    nested += ', "role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}'
    path.write_text(path.read_text() + nested)
    counts = pack(path, tmp_path / "data", tokenizer, max_bad=1).counts
    assert counts.num_samples + len(counts.bad) == 3
    assert depth == 700 or counts.num_samples == (3 if depth == 100 else 2)  # 700: as Python's version has it
    assert all(where == f"{path}:3" and hint for _, where, hint in counts.bad)


def test_lines_in_a_json_file_are_refused_with_the_name_that_they_need(
    tmp_path: Path, tokenizer: Path
) -> None:
    path = write_lines(tmp_path / "a.json", chats(2))
    with pytest.raises(DataError, match="line 2: Extra data") as refused:
        pack(path, tmp_path / "data", tokenizer)
    assert ".jsonl" in refused.value.hint


def test_units_of_other_special_tokens_are_not_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are named beside the tokenizer, in a file that may be corrected after a kill."""
    family = next(family for family in FAMILIES if family.name == "mistral")
    tokenizer = write_tokenizer(tmp_path / "tokenizer", family, template=family.template)
    config = tokenizer / "tokenizer_config.json"
    named = config.read_text()
    config.write_text(json.dumps(json.loads(named) | {"bos_token": None}))
    path = write_lines(tmp_path / "a.jsonl", chats(3))

    def killed(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(packing, "new_dataset", killed)
        with pytest.raises(KeyboardInterrupt):
            pack(path, tmp_path / "data", tokenizer)
    assert (tmp_path / ".data.packing" / "0.json").is_file()
    config.write_text(named)
    pack(path, tmp_path / "data", tokenizer)
    dataset = TokenFile.open(tmp_path / "data")
    bos = ChatJob(str(tokenizer / "tokenizer.json"), None, datetime.date.today()).open_tokenizer().begin_ids
    assert [dataset.document(index)[:1].tolist() for index in range(3)] == [bos] * 3


def test_one_process_packs_a_dataset_at_a_time(tmp_path: Path, tokenizer: Path) -> None:
    path, part = write_lines(tmp_path / "a.jsonl", chats(3)), tmp_path / ".data.packing" / "0.tokens"
    with job_folder(part.parent, ["the settings of another call"]):
        part.write_bytes(b"tokens")
        with pytest.raises(DataError, match="another process is packing") as refused:
            pack(path, tmp_path / "data", tokenizer)
        assert part.read_bytes() == b"tokens" and "-o" in refused.value.hint
    assert pack(path, tmp_path / "data", tokenizer).counts.num_samples == 3
    assert not part.parent.exists()


@pytest.mark.parametrize(
    ("state", "fact"),
    [
        ({"_data_files": []}, "has no rows"),
        ({"_data_files": ["data.arrow"]}, "names no data files"),
        ({"_data_files": 3}, "names no data files"),
        ({}, "names no data files"),
    ],
)
def test_a_saved_dataset_without_files_is_refused(
    state: dict[str, Any], fact: str, tmp_path: Path, tokenizer: Path
) -> None:
    """`save_to_disk` writes no file for a dataset, or a split, without rows."""
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "state.json").write_text(json.dumps(state))
    with pytest.raises(DataError, match=fact) as refused:
        pack(tmp_path / "saved", tmp_path / "data", tokenizer)
    assert refused.value.hint and not (tmp_path / "data").exists()


def test_a_killed_worker_is_no_fault(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by the system where memory runs out: what is done stays."""
    path = write_lines(tmp_path / "a.jsonl", chats())
    monkeypatch.setattr(packing, "PIECE_BYTES", 1500)
    with monkeypatch.context() as patch:
        patch.setattr(packing, "_encode_in_process", _killed)
        with pytest.raises(DataError, match="a worker process was killed") as refused:
            pack(path, tmp_path / "data", tokenizer, processes=2)
    assert "--processes" in refused.value.hint and (tmp_path / ".data.packing" / "job").is_file()
    assert pack(path, tmp_path / "data", tokenizer).counts.num_samples == 40


def _killed(*arguments: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
