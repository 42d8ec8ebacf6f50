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
    assert found["perplexity"] is None  # the loss is that of a pair, not of a token
    assert found["pairs"]["count"] > 0 and 0 <= found["pairs"]["reward_accuracy"] <= 1
    assert command(["evaluate", str(home / "live"), "--data", str(home / "pairs"), "-q"]) == 0
    assert f"{NUM_PAIRS} pairs" in capsys.readouterr().out


def test_evaluate_refuses_pairs_that_it_cannot_compare(run_file: str, capsys: Captured):
    """Pairs read as chats, and the reference of a folder that does not know its own start."""
    home = Path(run_file).parent
    pairs = ["--data", str(home / "pairs"), "data.packing=whole"]
    assert command(["train", run_file, "--dir", str(home / "run"), "-q"]) == 0
    assert command(["convert", str(home / "run"), str(home / "folder")]) == 0
    capsys.readouterr()
    assert command(["evaluate", str(home / "run"), "preference=null", *pairs]) == 2
    assert "the dataset holds preference pairs" in capsys.readouterr().err
    assert command(["evaluate", str(home / "folder"), "preference={beta: 0.5}", *pairs]) == 2
    assert "does not record from which weights" in capsys.readouterr().err
    assert command(["evaluate", str(home / "folder"), "preference={loss: simpo}", *pairs]) == 0


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


def test_a_pass_with_rows_of_another_length_does_not_continue(
    run_file: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
):
    """Rows of another length have other pairs, so those done by number would leave some out."""
    folder, compute = Path(run_file).parent / "pairs", store_log_probs.reference_log_probs
    passes = ["data", "logprobs", run_file, "-q", "model.max_positions=32"]
    assert command([*passes, "data.sequence_length=32"]) == 0
    expected = np.load(folder / "reference_logprobs.npy")
    for name in ("reference_logprobs.npy", "reference_logprobs.json"):
        (folder / name).unlink()
    monkeypatch.setattr(store_log_probs, "BATCHES_BETWEEN_SAVES", 1)

    def killed_later(*arguments, rows: range):
        if rows.start:
            raise KeyboardInterrupt
        return compute(*arguments, rows=rows)

    monkeypatch.setattr(store_log_probs, "reference_log_probs", killed_later)
    assert command(passes) != 0
    assert list(folder.glob(".reference*"))
    monkeypatch.setattr(store_log_probs, "reference_log_probs", compute)
    assert command([*passes, "data.sequence_length=32"]) == 0
    assert np.load(folder / "reference_logprobs.npy") == pytest.approx(expected, rel=1e-12)


def test_a_dataset_that_cannot_be_written_is_refused_before_the_pass(
    run_file: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
):
    monkeypatch.setattr("os.access", lambda *_: False)  # permissions do not bind the user of a container
    monkeypatch.setattr(
        store_log_probs, "reference_log_probs", lambda *_, **__: pytest.fail("it was computed")
    )
    assert command(["data", "logprobs", run_file]) == 2
    assert "cannot be written" in capsys.readouterr().err


DAMAGE = {"no mapping": (b"[1]", None), "empty": (None, b""), "cut": (None, b"\x93NUMPY\x01\x00")}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_log_probs_are_refused(run_file: str, capsys: Captured, kind: str):
    """Those of the dataset, of the run, and of a pass that was interrupted, which begins again."""
    home = Path(run_file).parent
    train = ["train", run_file, "--dir", str(home / "run"), "-q"]
    assert command(["data", "logprobs", run_file, "-q"]) == 0
    assert command([*train, "--stop-after", "1"]) == 0
    damage(home / "pairs", "reference_logprobs", kind)
    damage(home / "run", "reference", kind)
    capsys.readouterr()
    for words in (train, [*train[:-2], str(home / "new"), "preference.reference=dataset"]):
        assert command(words) == 2
        assert "cannot be read" in capsys.readouterr().err
    for suffix in ("npy", "json"):
        file = home / f"pairs/reference_logprobs.{suffix}"
        file.rename(home / f"pairs/.reference_logprobs.partial.{suffix}")
    assert command(["data", "logprobs", run_file, "-q"]) == 0


def damage(folder: Path, name: str, kind: str) -> None:
    for suffix, content in zip(("json", "npy"), DAMAGE[kind], strict=True):
        if content is not None:
            (folder / f"{name}.{suffix}").write_bytes(content)


def test_log_probs_follow_the_scale_of_a_peft_folder(
    run_file: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
):
    """The folder may be named by its path below the user's home; its config counts, as its tensors do."""
    home = Path(run_file).parent
    monkeypatch.setenv("HOME", str(home))
    assert command(["train", run_file, "--dir", str(home / "base.run"), "-q"]) == 0
    assert command(["convert", str(home / "base.run"), str(home / "base")]) == 0
    adapted = ["adapter={rank: 2, alpha: 4}", f"checkpoint.start_from={home / 'base'}"]
    assert command(["train", run_file, "--dir", str(home / "tuned"), "-q", *adapted]) == 0
    assert command(["convert", str(home / "tuned"), str(home / "peft"), "--to", "peft"]) == 0
    adapted[0] = "adapter={rank: 2, alpha: 4, start_from: ~/peft}"
    assert command(["data", "logprobs", run_file, "-q", *adapted]) == 0
    train = ["train", run_file, *adapted, "preference.reference=dataset", "-q", "--dir"]
    assert command([*train, str(home / "same")]) == 0
    config = json.loads((home / "peft/adapter_config.json").read_text())
    (home / "peft/adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 9}))
    capsys.readouterr()
    assert command([*train, str(home / "other")]) == 2
    assert "are of other weights" in capsys.readouterr().err


def test_a_loss_without_reference_has_no_log_probs(run_file: str, capsys: Captured):
    assert command(["data", "logprobs", run_file, "preference.loss=simpo"]) == 2
    assert "no preference loss with a reference" in capsys.readouterr().err
