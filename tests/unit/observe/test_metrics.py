"""metrics.jsonl: strict JSON, complete after a kill, one clean history after a resume."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshwright.observe.metrics import MetricsWriter, StepMetrics, WorkRate, read_metrics

RATE = WorkRate(flops_per_token=6e9, num_ranks=4)


def a_step(step: int, **changes: Any) -> StepMetrics:
    values: dict[str, Any] = {
        "step": step,
        "loss": 5.0 / step,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "tokens": 1000 * step,
        "step_tokens": 1000,
        "step_seconds": 0.5,
        "peak_bytes": 2**30,
    }
    return StepMetrics(**{**values, **changes})


def write(run_dir: Path, *steps: StepMetrics, restored_step: int = 0) -> None:
    with MetricsWriter(run_dir, RATE, restored_step=restored_step) as writer:
        for step in steps:
            writer.write(step)


def strict(line: str) -> dict[str, Any]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(line, parse_constant=refuse)


def test_line_has_the_promised_keys_in_order(tmp_path: Path) -> None:
    write(tmp_path, a_step(1))
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert list(strict(line)) == [
        *("step", "loss", "grad_norm", "lr", "tokens", "step_seconds"),
        *("tokens_per_second", "tflops_per_gpu", "mfu", "peak_bytes", "step_tokens"),
    ]


def test_optional_keys_appear_only_when_given(tmp_path: Path) -> None:
    write(tmp_path, a_step(1, eval_loss=4.0, loss_scale=65536.0, skipped=False), a_step(2))
    first, second = read_metrics(tmp_path)
    assert (first["eval_loss"], first["loss_scale"], first["skipped"]) == (4.0, 65536.0, False)
    assert not {"eval_loss", "loss_scale", "skipped", "expert_load_max"} & set(second)


def test_rates() -> None:
    filled = WorkRate(flops_per_token=6e9, num_ranks=4, peak_flops_per_second=30e12).fill(a_step(1))
    assert filled.tokens_per_second == 2000.0
    assert filled.tflops_per_gpu == pytest.approx(2000 * 6e9 / 4 / 1e12)
    assert filled.mfu == pytest.approx(0.1)


def test_mfu_is_null_when_the_peak_is_unknown(tmp_path: Path) -> None:
    write(tmp_path, a_step(1))
    assert strict((tmp_path / "metrics.jsonl").read_text())["mfu"] is None


def test_a_step_without_time_has_no_rates() -> None:
    assert RATE.fill(a_step(1, step_seconds=0.0)).tokens_per_second is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_numbers_survive_as_strict_json(tmp_path: Path, value: float) -> None:
    write(tmp_path, a_step(1, loss=value))
    strict((tmp_path / "metrics.jsonl").read_text())
    (row,) = read_metrics(tmp_path)
    assert repr(row["loss"]) == repr(value)


def test_reader_ignores_an_incomplete_last_line(tmp_path: Path) -> None:
    write(tmp_path, a_step(1), a_step(2))
    path = tmp_path / "metrics.jsonl"
    for num_bytes in range(1, len(path.read_bytes().splitlines(keepends=True)[1])):
        whole = path.read_bytes()
        path.write_bytes(whole[:-num_bytes])
        assert [row["step"] for row in read_metrics(path)] == [1]
        path.write_bytes(whole)


DAMAGE = {
    "empty": b"",
    "null": b"null",
    "list": b"[1]",
    "no step": b'{"loss": 1}',
    "step is a truth value": b'{"step": true}',
    "negative step": b'{"step": -1}',
    "step is text": b'{"step": "NaN"}',
    "not text": b"\xff\xfe",
    "zeros": b"\0" * 64,
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_reader_skips_damaged_lines(tmp_path: Path, damage: bytes) -> None:
    write(tmp_path, a_step(1), a_step(2))
    path = tmp_path / "metrics.jsonl"
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + damage + b"\n" + second)
    assert [row["step"] for row in read_metrics(path)] == [1, 2]


def test_reader_drops_values_that_are_not_numbers(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": {"a": 1}, "lr": "fast", "extra": 7}\n')
    assert read_metrics(tmp_path) == [{"step": 1, "extra": 7}]


def test_missing_file_has_no_rows(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "nowhere") == []


def test_resume_removes_later_steps_and_the_incomplete_line(tmp_path: Path) -> None:
    write(tmp_path, *(a_step(step) for step in range(1, 8)))
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + b'{"step": 8, "lo')
    write(tmp_path, a_step(5, loss=0.25), restored_step=4)
    steps = [strict(line)["step"] for line in path.read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5]
    assert read_metrics(path)[-1]["loss"] == 0.25
    assert sorted(os.listdir(tmp_path)) == ["metrics.index", "metrics.jsonl"]


def test_resume_leaves_a_clean_file_untouched(tmp_path: Path) -> None:
    write(tmp_path, a_step(1), a_step(2))
    path = tmp_path / "metrics.jsonl"
    inode, content = path.stat().st_ino, path.read_bytes()
    write(tmp_path, restored_step=2)
    assert (path.stat().st_ino, path.read_bytes()) == (inode, content)


def test_lines_survive_a_kill(tmp_path: Path) -> None:
    """The process dies by SIGKILL right after its third write; all three lines are there."""
    program = f"""
import os, signal
from meshwright.observe.metrics import MetricsWriter, StepMetrics, WorkRate
writer = MetricsWriter({str(tmp_path)!r}, WorkRate(1.0, 1))
for step in (1, 2, 3):
    writer.write(StepMetrics(step=step, loss=1.0, grad_norm=1.0, lr=1.0, tokens=step, step_tokens=1,
                             step_seconds=1.0, peak_bytes=None))
os.kill(os.getpid(), signal.SIGKILL)
"""
    finished = subprocess.run([sys.executable, "-c", program], check=False)
    assert finished.returncode == -signal.SIGKILL
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3]
