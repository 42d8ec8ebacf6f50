"""Offline advantages: weights of tokens from another program, of both signs, through pack and train."""

import json
from pathlib import Path

import pytest
from tests.support.chat_templates import FAMILIES, write_tokenizer
from tests.support.run_files import TRAINABLE, write_run_file

from meshwright.cli.main import run as command

QWEN = next(family for family in FAMILIES if family.name == "qwen-2.5")
PROMPT, GOOD, BAD = [11, 12, 13], [21, 22, 23, 24], [31, 32, 33, 34]


def packed(home: Path, name: str, samples: list[tuple[list[int], float]]) -> str:
    records = [
        {"input_ids": [*PROMPT, *answer], "weights": [0] * len(PROMPT) + [advantage] * len(answer)}
        for answer, advantage in samples
    ]
    (home / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    tokenizer = write_tokenizer(home / "tokenizer", QWEN, template=None)
    arguments = ["--chat", "tokens", "--tokenizer", str(tokenizer), "-o", str(home / name)]
    assert command(["data", "pack", str(home / f"{name}.jsonl"), *arguments]) == 0
    return str(home / name)


def test_answers_with_negative_advantages_become_less_probable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    scored = packed(tmp_path, "scored", [(GOOD, 1.0), (BAD, -1.0)] * 4)
    alone = {"good": packed(tmp_path, "good", [(GOOD, 1.0)]), "bad": packed(tmp_path, "bad", [(BAD, 1.0)])}
    model = {**TRAINABLE["model"], "vocab_size": 1024}
    data = {"path": scored, "packing": "whole", "sequence_length": 32, "batch_sequences": 2}
    checkpoint = {"every_steps": 1, "keep_last": 10}
    run = write_run_file(
        tmp_path / "run.yaml", model=model, data=data, checkpoint=checkpoint, schedule={"num_steps": 4}
    )
    assert command(["train", run, "--dir", str(tmp_path / "run"), "--quiet"]) == 0
    losses: dict[str, list[float]] = {"good": [], "bad": []}
    for name, path in alone.items():
        for step in (1, 4):
            capsys.readouterr()
            where = ["--data", path, "--checkpoint", str(step), "--json", "data.batch_sequences=1"]
            assert command(["evaluate", str(tmp_path / "run"), *where]) == 0
            losses[name].append(json.loads(capsys.readouterr().out)["loss"])
    assert losses["good"][1] < losses["good"][0] and losses["bad"][1] > losses["bad"][0]
