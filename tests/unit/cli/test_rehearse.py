"""`rehearse` on the command line: the trace, then the proof."""

import json

import pytest
from tests.support.run_files import write_run_file
from tests.unit.rehearse import test_prove
from tests.unit.rehearse.test_prove import KeptPool

from meshwright.cli.main import run
from meshwright.errors import EXIT_DONE, EXIT_INPUT, EXIT_RUN_FAILED
from meshwright.rehearse import prove as proving


def test_trace_and_proof_in_one_document(ranks, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(proving, "RankPool", lambda **_: KeptPool(ranks))
    file = write_run_file(tmp_path / "run.yaml", parallel={"dp_shard": 4, "zero": 2})
    assert run(["rehearse", file, "--json"]) == EXIT_DONE
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["ranks"]
    (proof,) = found["proof"]
    assert proof["left_out"] == ["dp_shard 4 -> 2"]
    assert proof["worst_error"] <= proof["tolerance"] == 1e-9
    assert "proving dp_shard2, zero 2 in float64 against one device" in err


def test_a_failed_proof_exits_four_and_names_the_worst(ranks, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(proving, "RankPool", lambda **_: KeptPool(ranks))
    genuine = proving.prove
    planted = test_prove._scaled_sums
    monkeypatch.setattr(proving, "prove", lambda smalls, **options: genuine(smalls, **options, job=planted))
    file = write_run_file(tmp_path / "run.yaml", parallel={"dp_replicate": 2})
    assert run(["rehearse", file]) == EXIT_RUN_FAILED
    err = capsys.readouterr().err
    assert "the proof failed: dp_replicate2 on 2 gloo ranks" in err
    assert "the worst is " in err and "hint:" in err


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        (["--rank", "1"], "rank 1 is outside a world of 1 rank"),
        (["--imbalance", "2"], "--imbalance 2 has no effect: custom has no experts"),
        (["--all-pairs", "--no-proof"], "--all-pairs has no effect with --no-proof"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_senseless_options_are_refused_before_the_trace(options, fact, tmp_path, capsys):
    assert run(["rehearse", write_run_file(tmp_path / "run.yaml"), *options]) == EXIT_INPUT
    told = capsys.readouterr().err
    assert told.startswith(f"error: {fact}") and f"where: {options[0]}" in told and "hint:" in told


def test_the_proof_can_be_left_out(monkeypatch, tmp_path, capsys):
    file = write_run_file(tmp_path / "run.yaml")
    assert run(["rehearse", file, "--no-proof", "--json"]) == EXIT_DONE
    assert json.loads(capsys.readouterr().out)["proof"] == []
