"""Following a file: each new line, a file that is replaced, and a rough view of a long one first."""

import json
from pathlib import Path

import numpy as np
import pytest

from meshwright.observe.metrics import MetricsWriter, StepMetrics, WorkRate
from meshwright.observe.metrics_index import read_index
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


def indexed(run_dir: Path, last: int, *, first: int = 1) -> None:
    """Steps as a run writes them, with the index beside them."""
    with MetricsWriter(run_dir, WorkRate(None, 1), restored_step=first - 1) as metrics:
        for step in range(first, last + 1):
            loss = float("nan") if step == 7 else 10.0 / step
            held_out = 1e300 if step == 20 else None
            metrics.write(
                StepMetrics(
                    step=step,
                    loss=loss,
                    grad_norm=1.0,
                    lr=1e-4,
                    tokens=64 * step,
                    step_tokens=64,
                    step_seconds=0.5,
                    peak_bytes=None,
                    eval_loss=held_out,
                )
            )


def same_rows(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the rows from the index are those from the lines."""
    found = []
    for long_bytes in (0, 1 << 40):
        monkeypatch.setattr(metrics_tail, "_LONG_BYTES", long_bytes)
        tail = MetricsTail(run_dir)
        read_all(tail)
        found.append(tail.columns)
    ours, theirs = found
    assert set(ours.names) == set(theirs.names)
    assert ours.steps.tolist() == theirs.steps.tolist()
    return all(np.array_equal(ours.values(one), theirs.values(one), equal_nan=True) for one in ours.names)


def is_indexed(run_dir: Path) -> bool:
    return read_index(run_dir / "metrics.jsonl") is not None


def test_the_index_has_the_rows_of_the_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    indexed(tmp_path, 50)
    assert is_indexed(tmp_path) and same_rows(tmp_path, monkeypatch)
    write(tmp_path, 51, 60)  # lines whose rows a killed run did not write
    assert is_indexed(tmp_path) and same_rows(tmp_path, monkeypatch)
    indexed(tmp_path, 70, first=41)  # a resume at step 40
    assert is_indexed(tmp_path) and same_rows(tmp_path, monkeypatch)
    found = read_index(tmp_path / "metrics.jsonl")
    assert found is not None and found.steps.tolist() == list(range(1, 71))
    assert found.end == (tmp_path / "metrics.jsonl").stat().st_size


def test_an_index_is_written_again_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    indexed(tmp_path, 30)
    (tmp_path / "metrics.index").unlink()
    indexed(tmp_path, 40, first=31)
    assert is_indexed(tmp_path) and same_rows(tmp_path, monkeypatch)


@pytest.mark.parametrize("damage", ["edited", "shorter", "foreign", "torn", "reordered"])
def test_an_index_of_another_file_is_not_believed(tmp_path: Path, damage: str, monkeypatch):
    indexed(tmp_path, 50)
    metrics, index = tmp_path / "metrics.jsonl", tmp_path / "metrics.index"
    lines = metrics.read_bytes().splitlines(keepends=True)
    if damage == "edited":
        metrics.write_bytes(b"".join([lines[0].replace(b"10.0", b"11.5"), *lines[1:]]))
    elif damage == "shorter":
        metrics.write_bytes(b"".join(lines[:-2]))
    elif damage == "foreign":
        index.write_bytes(b"something else\n" * 500)
    elif damage == "torn":
        index.write_bytes(index.read_bytes()[:-5])
    else:
        metrics.write_bytes(b"".join([*lines[1:], lines[0]]))
    assert is_indexed(tmp_path) == (damage == "torn")
    assert same_rows(tmp_path, monkeypatch)
