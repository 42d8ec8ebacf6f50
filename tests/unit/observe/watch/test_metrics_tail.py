"""Following a file: each new line, a file that is replaced, and a rough view of a long one first."""

import json
from pathlib import Path

import pytest

from meshwright.observe.watch import metrics_tail
from meshwright.observe.watch.metrics_tail import MetricsTail


def write(path: Path, first: int, last: int, mode: str = "a") -> None:
    with (path / "metrics.jsonl").open(mode) as file:
        file.writelines(
            json.dumps({"step": step, "loss": 10.0 / step}) + "\n" for step in range(first, last + 1)
        )


def read_all(tail: MetricsTail) -> None:
    while tail.read() or not tail.is_complete:
        pass


def test_new_lines_are_appended(tmp_path: Path):
    tail = MetricsTail(tmp_path)
    assert not tail.read()  # there is no file yet
    write(tmp_path, 1, 5)
    read_all(tail)
    generation = tail.generation
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    tail.read()
    assert len(tail.columns) == 5
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('ss": 1.5}\n')
    assert tail.read()
    assert tail.columns.steps.tolist() == [1, 2, 3, 4, 5, 6] and tail.columns.last("loss") == 1.5
    assert tail.generation == generation


def test_a_replaced_file_is_read_from_its_begin(tmp_path: Path):
    tail = MetricsTail(tmp_path)
    write(tmp_path, 1, 9)
    read_all(tail)
    generation = tail.generation
    draft = tmp_path / "draft"
    draft.mkdir()
    write(draft, 1, 4)
    (draft / "metrics.jsonl").replace(tmp_path / "metrics.jsonl")
    read_all(tail)
    assert len(tail.columns) == 4 and tail.generation > generation


def test_a_long_file_is_shown_roughly_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(metrics_tail, "_LONG_BYTES", 10_000)
    monkeypatch.setattr(metrics_tail, "_BLOCK_BYTES", 4096)
    write(tmp_path, 1, 20_000)
    tail = MetricsTail(tmp_path)
    tail.read()
    assert not tail.is_complete and 0 < tail.progress < 0.1
    rough = tail.columns
    assert 100 < len(rough) < 700 and rough.steps[-1] > 19_900
    read_all(tail)
    assert len(tail.columns) == 20_000 and tail.progress == 1.0
