"""`plan --verify` end to end: the traces of two small layouts beside their predictions."""

import json

import pytest

from meshwright.cli.main import run as command

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


def test_the_best_layouts_are_traced(capsys: pytest.CaptureFixture[str]) -> None:
    assert command([*SMALL, "--verify", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["verified"]
    assert len(found["layouts"]) == 2 and "the order stays" in found["order"]
    for each in found["layouts"]:
        assert each["fits"] and each["predicted_bytes"] == pytest.approx(each["traced_bytes"], rel=0.1)
