"""`meshwright env` tells facts and no secrets."""

import json
import platform

import pytest

from meshwright.cli.main import run

FIELDS = {"name", "state", "gigabits_per_second"}


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


def test_who_started_the_ranks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    run(["env"])
    assert "launched     by nobody" in capsys.readouterr().out
    task = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    for name, value in {**task, "MASTER_ADDR": "h0", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    run(["env", "--json"])
    facts = json.loads(capsys.readouterr().out)
    assert facts["launched"] == "rank 3 of 8, local rank 1 by mpirun, rank 0 at h0:29500"
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "x")
    run(["env"])
    assert "cannot be told: OMPI_COMM_WORLD_RANK='x' is not a number" in capsys.readouterr().out


def test_links_without_addresses(capsys: pytest.CaptureFixture[str]):
    run(["env", "--json"])
    links = json.loads(capsys.readouterr().out)["links"]
    assert links["numa_nodes"] and all(set(one) == FIELDS for one in links["interfaces"])
    assert links["gloo"].startswith("of torch") and "nccl" in links


def test_a_secret_is_named_and_not_shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MESHWRIGHT_RUN_SECRET", "hunter2")
    run(["env"])
    out = capsys.readouterr().out
    assert "MESHWRIGHT_RUN_SECRET=(set)" in out and "hunter2" not in out
