"""`meshwright sample`."""

import json
from pathlib import Path

import pytest
from tests.support.run_files import train_run_file

from meshwright.cli.main import run

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_run_file(tmp_path_factory.mktemp("trained"), "checkpoint.every_steps=2")


def sampled(trained: Path, capsys: Captured, *options: str) -> str:
    assert run(["sample", str(trained), "--prompt", "It was", "--tokens", "12", *options]) == 0
    return capsys.readouterr().out


def test_text_continues_the_prompt(trained: Path, capsys: Captured):
    text = sampled(trained, capsys)
    assert text.startswith("It was") and len(text) > len("It was") + 1


def test_the_same_seed_writes_the_same_text(trained: Path, capsys: Captured):
    texts = [sampled(trained, capsys, "--seed", seed) for seed in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2]


def test_temperature_zero_takes_the_most_likely(trained: Path, capsys: Captured):
    texts = {sampled(trained, capsys, "--temperature", "0", "--seed", seed) for seed in ("1", "2")}
    assert texts == {sampled(trained, capsys, "--top-k", "1", "--seed", "3")}


def test_a_prompt_longer_than_the_model_sees(trained: Path, capsys: Captured):
    assert run(["sample", str(trained), "--prompt", "long " * 40, "--tokens", "3"]) == 0
    assert capsys.readouterr().out.startswith("long long")


def test_json_names_the_checkpoint(trained: Path, capsys: Captured):
    document = json.loads(sampled(trained, capsys, "--json", "--checkpoint", "2"))
    assert document["step"] == 2 and document["checkpoint"].endswith("step-00000002")
    assert document["prompt"] == "It was" and document["text"]


def test_the_average_is_another_model(trained: Path, capsys: Captured):
    greedy = ("--temperature", "0", "--json")
    last, average = (json.loads(sampled(trained, capsys, *greedy, *more)) for more in ((), ("--ema",)))
    assert last["checkpoint"] == average["checkpoint"]
    from meshwright.checkpoint.weights import open_weights

    a, b = open_weights(trained).tensors, open_weights(trained, averaged=True).tensors
    assert not a["head.weight"].equal(b["head.weight"])


@pytest.mark.parametrize(
    ("options", "fact", "hint"),
    [
        (["--prompt", ""], "the prompt has no tokens", "--prompt"),
        (["--prompt", "x", "--checkpoint", "3"], "there is no checkpoint of step 3", "there are 2, 4"),
        (["--prompt", "x", "--tokenizer", "none"], "there is no tokenizer here", "bytes"),
        (["--prompt", "x", "--temperature", "inf"], "inf is not a finite number", "--help"),
        (["--prompt", "x", "--temperature", "0", "--top-k", "3"], "it has no effect", "--help"),
        (["--prompt", "x", "--device", "tpu"], "'tpu' is none of cpu, cuda and auto", "--help"),
    ],
)
def test_bad_input_is_refused(trained: Path, capsys: Captured, options: list[str], fact: str, hint: str):
    assert run(["sample", str(trained), *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and fact in captured.err and hint in captured.err


def test_no_such_directory(tmp_path: Path, capsys: Captured):
    assert run(["sample", str(tmp_path / "none"), "--prompt", "x"]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_run_without_an_average(tmp_path: Path, capsys: Captured):
    directory = train_run_file(tmp_path, "optim.ema_decay=null", "schedule.num_steps=1")
    assert run(["sample", str(directory), "--prompt", "x", "--ema"]) == 2
    assert "the run has no average" in capsys.readouterr().err
