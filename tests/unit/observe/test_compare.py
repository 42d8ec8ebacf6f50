"""Comparing two runs: exact where asked, and an exit code that a script can rely on."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from meshwright.cli.main import run as run_cli
from meshwright.observe.compare import compare_histories, different_settings, relative_difference
from meshwright.observe.history import History


def history(*losses: float | None) -> History:
    count = len(losses)
    return History(
        np.arange(1, count + 1),
        {
            "loss": np.array([math.nan if loss is None else loss for loss in losses]),
            "grad_norm": np.ones(count),
        },
        {"loss": np.array([loss is not None for loss in losses]), "grad_norm": np.ones(count, np.bool_)},
    )


def write_run(run_dir: Path, losses: list[float], lr: float = 1e-3) -> str:
    run_dir.mkdir()
    lines = [json.dumps({"step": step, "loss": loss}) + "\n" for step, loss in enumerate(losses, start=1)]
    (run_dir / "metrics.jsonl").write_text("".join(lines))
    (run_dir / "run.yaml").write_text(f"name: {run_dir.name}\noptim:\n  lr: {lr}\n")
    return str(run_dir)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (1.0, 1.0, 0.0),
        (0.0, 0.0, 0.0),
        (2.0, 1.0, 0.5),
        (-1.0, 1.0, 2.0),
        (math.nan, math.nan, 0.0),
        (math.inf, math.inf, 0.0),
        (math.inf, -math.inf, math.inf),
        (math.nan, 1.0, math.inf),
        (1.7e308, -1.7e308, 2.0),
        (0.0, 5e-324, 1.0),
    ],
)
def test_relative_difference(a: float, b: float, expected: float) -> None:
    assert relative_difference(np.array([a]), np.array([b])) == [expected]
    assert relative_difference(np.array([b]), np.array([a])) == [expected]


def test_equal_runs() -> None:
    comparison = compare_histories(history(3.0, math.nan, 1.0), history(3.0, math.nan, 1.0))
    assert comparison.is_equal
    assert [difference.name for difference in comparison.differences] == ["loss", "grad_norm"]


def test_first_and_largest_difference_are_found() -> None:
    comparison = compare_histories(history(4.0, 2.0, 1.0, 1.0), history(4.0, 2.0, 1.25, 2.0))
    loss = comparison.differences[0]
    assert (loss.num_different, loss.first_different) == (2, 3)
    assert (loss.max_relative, loss.max_relative_at) == (0.5, 4)
    assert not comparison.is_equal
    assert compare_histories(history(4.0, 1.0), history(4.0, 1.25), rtol=0.2).is_equal


def test_one_bit_is_a_difference() -> None:
    assert not compare_histories(history(1.0), history(math.nextafter(1.0, 2.0))).is_equal


def test_a_missing_step_or_value_is_a_difference() -> None:
    shorter = compare_histories(history(1.0, 2.0), history(1.0))
    assert (shorter.only_in_a, shorter.only_in_b, shorter.is_equal) == ([2], [], False)
    assert not compare_histories(history(1.0, 2.0), history(1.0, None), rtol=1e9).is_equal


def test_settings_that_differ() -> None:
    a = {"name": "a", "optim": {"lr": 1, "eps": 2}, "only": 1}
    b = {"name": "b", "optim": {"lr": 3, "eps": 2}, "new": {"deep": True}}
    assert different_settings(a, b) == [
        ("name", "a", "b"),
        ("optim.lr", 1, 3),
        ("only", 1, None),
        ("new.deep", None, True),
    ]


def test_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write_run(tmp_path / "a", [3.0, 2.0])
    same = write_run(tmp_path / "same", [3.0, 2.0])
    other = write_run(tmp_path / "other", [3.0, 2.002], lr=2e-3)
    assert run_cli(["compare", a, same, "--assert-equal"]) == 0
    assert "2 shared steps, equal bit for bit" in capsys.readouterr().out
    assert run_cli(["compare", a, other]) == 0
    printed = capsys.readouterr().out
    assert "different: loss from step 2, at most 0.000999 relative" in printed
    assert "optim.lr" in printed
    assert run_cli(["compare", a, other, "--assert-equal"]) == 4
    assert "the runs differ: loss from step 2" in capsys.readouterr().err
    assert run_cli(["compare", a, other, "--assert-equal", "--rtol", "1e-2"]) == 0
    assert run_cli(["compare", a, other, "--assert-equal", "--steps", "1"]) == 0


def test_nothing_compared_is_not_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "a", [3.0])
    (tmp_path / "a" / "metrics.jsonl").write_text('{"step": 1, "lr": 0.1}\n')
    assert run_cli(["compare", run, run, "--assert-equal"]) == 4
    assert "nothing was compared" in capsys.readouterr().err


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write_run(tmp_path / "a", [3.0, 2.0]), write_run(tmp_path / "b", [3.0, math.nan])
    assert run_cli(["compare", a, b, "--json", "--assert-equal"]) == 4
    document = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert document["equal"] is False
    assert document["differences"][0]["max_relative"] == "Infinity"
    assert ["name", "a", "b"] in document["settings"]


def test_bad_input_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, empty = write_run(tmp_path / "a", [3.0]), write_run(tmp_path / "empty", [])
    apart = write_run(tmp_path / "apart", [3.0])
    (tmp_path / "apart" / "metrics.jsonl").write_text('{"step": 9, "loss": 1.0}\n')
    for arguments in ([a, empty], [a, str(tmp_path / "no")], [a, apart], [a, f"{a}/run.yaml"]):
        assert run_cli(["compare", *arguments]) == 2
        assert "error: " in capsys.readouterr().err
    assert run_cli(["compare", a, a, "--rtol", "nan"]) == 2
