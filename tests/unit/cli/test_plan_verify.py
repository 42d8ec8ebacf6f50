"""`plan --verify` end to end: the traces of two small layouts beside their predictions."""

import json
from pathlib import Path

import pytest

from meshwright.cli.main import run as command
from meshwright.hardware.prediction_log import HOME_VARIABLE

SMALL = [
    "plan",
    "qwen3-0.6b",
    "model.num_layers=2",
    "--on",
    "h100:2",
    "--seq",
    "256",
    "--batch-tokens",
    "4096",
]


def test_the_best_layouts_are_traced_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path))
    assert command([*SMALL, "--verify", "2", "--json"]) == 0
    first = capsys.readouterr()
    found = json.loads(first.out)["verified"]
    assert "traced before" not in first.err
    assert command([*SMALL, "--verify", "2", "--json"]) == 0
    second = capsys.readouterr()
    assert "2 of 2 layouts were traced before" in second.err
    assert json.loads(second.out)["verified"]["layouts"] == found["layouts"]
    assert len(found["layouts"]) == 2 and "the order stays" in found["order"]
    for each in found["layouts"]:
        assert each["fits"] and each["predicted_bytes"] == pytest.approx(each["traced_bytes"], rel=0.1)
