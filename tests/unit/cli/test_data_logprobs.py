"""`data logprobs` stores the reference of a preference dataset; `evaluate` works for preference runs."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tests.support.pairs import NUM_PAIRS, pair_dataset, pair_run

from meshwright.cli.main import run as command
from meshwright.observe.metrics import read_metrics
from meshwright.spec import CheckpointSpec, ObserveSpec, PreferenceSpec
from meshwright.spec.observe import EvaluateSpec
from meshwright.spec.text import dump_run
from meshwright.train import store_log_probs

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def run_file(tmp_path: Path) -> str:
    """A run on pairs with its own copy of the dataset."""
    dataset = tmp_path / "pairs"
    shutil.copytree(pair_dataset(), dataset)
    run = pair_run(PreferenceSpec(beta=0.5))
    run = run.with_(
        data=run.data.with_(path=str(dataset)),
        checkpoint=CheckpointSpec(every_steps=3),
        observe=ObserveSpec(evaluate=EvaluateSpec(every_steps=3)),
    )
    file = tmp_path / "run.yaml"
    file.write_text(dump_run(run))
    return str(file)


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(folder)]


def test_a_run_with_stored_log_probs_equals_one_that_computes_them(run_file: str, capsys: Captured):
    home = Path(run_file).parent
    assert command(["data", "logprobs", run_file]) == 0
    shown = capsys.readouterr()
    assert f"reference log-probs of {NUM_PAIRS} pairs" in shown.out and "sequences" in shown.err
    assert command(["train", run_file, "--dir", str(home / "live"), "-q"]) == 0
    stored = ["preference.reference=dataset"]
    assert command(["train", run_file, *stored, "--dir", str(home / "stored"), "-q"]) == 0
    assert losses(home / "live") == losses(home / "stored")
    assert np.array_equal(np.load(home / "live/reference.npy"), np.load(home / "stored/reference.npy"))
    # What is stored and fits is left as it is.
    before = (home / "pairs/reference_logprobs.npy").stat().st_mtime_ns
    assert command(["data", "logprobs", run_file]) == 0
    assert (home / "pairs/reference_logprobs.npy").stat().st_mtime_ns == before
    held_out_loss = [row["eval_loss"] for row in read_metrics(home / "live") if "eval_loss" in row][-1]
    capsys.readouterr()
    assert command(["evaluate", str(home / "live"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["loss"] == pytest.approx(held_out_loss, rel=1e-12)
    assert found["pairs"]["count"] > 0 and 0 <= found["pairs"]["reward_accuracy"] <= 1
    assert command(["evaluate", str(home / "live"), "--data", str(home / "pairs"), "-q"]) == 0
    assert f"{NUM_PAIRS} pairs" in capsys.readouterr().out


def test_log_probs_of_other_weights_are_refused(run_file: str, capsys: Captured):
    home = Path(run_file).parent
    absent = ["train", run_file, "preference.reference=dataset", "--dir", str(home / "run"), "-q"]
    assert command(absent) == 2
    assert "the dataset has no reference log-probs" in capsys.readouterr().err
    assert command(["data", "logprobs", run_file, "-q"]) == 0
    other = ["seed=4", "preference.reference=dataset"]
    assert command(["train", run_file, *other, "--dir", str(home / "run"), "-q"]) == 2
    error = capsys.readouterr().err
    assert "the reference log-probs are of other weights: random weights of seed 3" in error
    table = (home / "pairs/reference_logprobs.npy").read_bytes()
    assert command(["data", "logprobs", run_file, "seed=4", "-q"]) == 2
    assert "--force" in capsys.readouterr().err
    assert (home / "pairs/reference_logprobs.npy").read_bytes() == table
    assert command(["data", "logprobs", run_file, "seed=4", "-q", "--force"]) == 0
    assert (home / "pairs/reference_logprobs.npy").read_bytes() != table


def test_the_same_command_continues_after_a_kill(run_file: str, monkeypatch: pytest.MonkeyPatch):
    folder = Path(run_file).parent / "pairs"
    assert command(["data", "logprobs", run_file, "-q"]) == 0
    expected = np.load(folder / "reference_logprobs.npy")
    for name in ("reference_logprobs.npy", "reference_logprobs.json"):
        (folder / name).unlink()
    monkeypatch.setattr(store_log_probs, "BATCHES_BETWEEN_SAVES", 1)
    compute, asked = store_log_probs.reference_log_probs, []

    def killed_once(*arguments, rows: range):
        asked.append(rows)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return compute(*arguments, rows=rows)

    monkeypatch.setattr(store_log_probs, "reference_log_probs", killed_once)
    assert command(["data", "logprobs", run_file, "-q"]) != 0
    assert command(["data", "logprobs", run_file, "-q"]) == 0
    assert asked[3] == asked[2] and asked[2].start > 0
    assert np.array_equal(np.load(folder / "reference_logprobs.npy"), expected)
    assert not list(folder.glob(".reference*"))


def test_a_loss_without_reference_has_no_log_probs(run_file: str, capsys: Captured):
    assert command(["data", "logprobs", run_file, "preference.loss=simpo"]) == 2
    assert "no preference loss with a reference" in capsys.readouterr().err
