"""`meshwright env` tells facts and no secrets."""

import json
import platform

import pytest

from meshwright.cli.main import run


def test_facts(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "7")
    assert run(["env", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["versions"]["python"] == platform.python_version()
    assert facts["machine"]["usable_cores"] >= 1
    assert facts["machine"]["memory_bytes"] > facts["machine"]["free_memory_bytes"] > 0
    assert facts["launcher"]["WORLD_SIZE"] == "7"


def test_text(capsys: pytest.CaptureFixture[str]):
    assert run(["env"]) == 0
    out = capsys.readouterr().out
    assert f"python       {platform.python_version()}" in out
    assert "usable of" in out


def test_other_variables_are_never_shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MY_SECRET_TOKEN", "hunter2")
    run(["env", "--json"])
    run(["env"])
    assert "hunter2" not in capsys.readouterr().out
