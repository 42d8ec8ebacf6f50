"""Bad input of fine-tuning at the command line: fact, place and hint, exit code 2, nothing written over."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file
from tests.support.chat_templates import FAMILIES, THINKING, write_tokenizer
from tests.support.golden_files import assert_golden
from tests.support.run_files import TRAINABLE

from meshwright.cli.main import run

QWEN = next(family for family in FAMILIES if family.name == "qwen-2.5")
QUESTION = {"role": "user", "content": "2 + 2?"}
ANSWER = {"role": "assistant", "content": "4"}
RECORDS = {
    "chats": [QUESTION, ANSWER],
    "unknown_role": [QUESTION, {"role": "robot", "content": "4"}],
    "empty_answer": [QUESTION, {"role": "assistant", "content": ""}],
    "longer": [QUESTION, {"role": "assistant", "content": "four " * 80}],
    "two_answers": [QUESTION, ANSWER, QUESTION, ANSWER],
}
RAISES = "{% if messages[0].role != 'system' %}{{ raise_exception('a system turn comes first') }}{% endif %}"
TEMPLATES = {"model": QWEN.template, "untemplated": None, "raising": RAISES, "thinking": THINKING}
PACK = "data pack {record}.jsonl --chat auto --tokenizer {tokenizer} --seq 128 -o new"
TRAIN = "train run.yaml --dir new"
LORA = "adapter={rank: 4, alpha: 8}"
OTHER = "checkpoint.start_from=other"

PACKED = {
    "no template": PACK.format(record="chats", tokenizer="untemplated"),
    "a template that raises": PACK.format(record="chats", tokenizer="raising"),
    "a template that rewrites earlier turns": PACK.format(record="two_answers", tokenizer="thinking"),
    "an unknown role": PACK.format(record="unknown_role", tokenizer="model"),
    "an empty answer": PACK.format(record="empty_answer", tokenizer="model"),
    "a sample longer than the sequence": PACK.format(record="longer", tokenizer="model"),
    "an existing dataset": "data pack chats.jsonl --chat auto --tokenizer model -o packed",
}
TRAINED: dict[str, list[str]] = {
    "a dataset longer than the sequence": [LORA, "data.sequence_length=8"],
    "a target close to a name": ["adapter={rank: 4, alpha: 8, targets: [q_porj]}"],
    "a target with the name of its module in peft": [
        "adapter={rank: 4, alpha: 8, targets: [model.layers.0.self_attn.q_proj]}"
    ],
    "a target far from all names": ["adapter={rank: 4, alpha: 8, targets: [mixer]}"],
    "a rank for a pattern that matches nothing": [
        "adapter={rank: 4, alpha: 8, ranks: [{pattern: down_porj, rank: 8}]}"
    ],
    "rank 0": ["adapter={rank: 0, alpha: 8}"],
    "no base": [LORA, "checkpoint.start_from=null"],
    "nf4 with another width": ["adapter={rank: 4, alpha: 8, base: nf4}", "model.mlp.width=96"],
    "nf4 with tp": ["adapter={rank: 4, alpha: 8, base: nf4}", "parallel.tp=2", "model.vocab_size=512"],
    "tp that does not divide the base's vocabulary": [LORA, "parallel.tp=2", "model.vocab_size=511"],
    "dropout of everything": ["adapter={rank: 4, alpha: 8, dropout: 1}"],
    "bf16 base with fp32 compute": ["adapter={rank: 4, alpha: 8, base: bf16}"],
    "dropout of tokens": ["adapter={rank: 4, alpha: 8, dropout: 0.1, targets: [embed_tokens]}"],
    "linears of an NF4 base trained in full": [
        "adapter={rank: 4, alpha: 8, base: nf4}",
        "train_only=['blocks.0.*']",
    ],
    "no adapter in the folder": ["adapter={rank: 4, alpha: 8, start_from: packed}"],
    "a base as the adapter": ["adapter={rank: 4, alpha: 8, start_from: base}"],
    "an adapter of another width": ["adapter={rank: 4, alpha: 8, start_from: wider}"],
    "an adapter of another base": ["adapter={rank: 4, alpha: 8, start_from: peft}", OTHER],
    "a run of another base": ["adapter={rank: 4, alpha: 8, start_from: tuned}", OTHER],
    "an adapter of another rank": ["adapter={rank: 8, alpha: 8, start_from: peft}"],
    "an adapter with other targets": ["adapter={rank: 4, alpha: 8, targets: [query], start_from: peft}"],
    "an adapter of another kind": ["adapter={rank: 4, alpha: 8, kind: dora, start_from: peft}"],
}
CONVERTED = {
    "an existing peft folder": "convert tuned peft --to peft",
    "a peft folder of a run without adapters": "convert base.run new --to peft",
    "the base of a run without adapters": "sample base.run --prompt a --no-adapter",
    "a question to data without a template": "sample base.run --prompt a --chat",
}
Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with records, tokenizers, a base, a run with adapters and a peft folder, by relative names."""
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, messages in RECORDS.items():
            lines = [[QUESTION, ANSWER], messages] if name != "chats" else [messages] * 8
            text = "".join(json.dumps({"messages": each}) + "\n" for each in lines)
            Path(f"{name}.jsonl").write_text(text)
        for name, template in TEMPLATES.items():
            write_tokenizer(folder / name, QWEN, template=template)
        command("data pack chats.jsonl --chat auto --tokenizer model -o packed")
        vocab_size = json.loads(Path("packed/dataset.json").read_text())["vocab_size"]
        model = TRAINABLE["model"] | {"vocab_size": -(-vocab_size // 64) * 64, "num_layers": 1}
        write_run("base.yaml", model=model)
        for seed, name in enumerate(("base", "other")):
            command(f"train base.yaml --dir {name}.run seed={seed}")
            command(f"convert {name}.run {name}")
        data = TRAINABLE["data"] | {"synthetic": None, "path": "packed", "packing": "whole"}
        write_run("run.yaml", model=model, data=data | {"sequence_length": 128}, base="base")
        command("train run.yaml --dir tuned", LORA)
        command("convert tuned peft --to peft")
        write_wider(Path("peft"), Path("wider"))
    return folder


def write_wider(folder: Path, output: Path) -> None:
    """The adapter of a model of twice the width."""
    shutil.copytree(folder, output)
    tensors = load_file(folder / "adapter_model.safetensors")
    wider = {name: np.concatenate([each, each], axis=int("lora_A" in name)) for name, each in tensors.items()}
    save_file(wider, output / "adapter_model.safetensors")


def write_run(name: str, *, base: str | None = None, **changes: object) -> None:
    short = {"schedule": {"num_steps": 1}, "optim": {"lr": 0.01}, "checkpoint": {"start_from": base}}
    Path(name).write_text(yaml.safe_dump({**TRAINABLE, **short, **changes}))


def command(words: str, *more: str) -> None:
    assert run([*words.split(), *more]) == 0


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_every_refusal_has_its_text(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.chdir(home)
    found: list[str] = []
    before = files(home)
    for title, words in [*PACKED.items(), *CONVERTED.items()]:
        found.append(refused(title, words.split(), words, capsys))
        assert files(home) == before, title
    for title, overrides in TRAINED.items():
        text = f"{TRAIN} {' '.join(overrides)}"
        found.append(refused(title, [*TRAIN.split(), *overrides], text, capsys))
        shutil.rmtree("new", ignore_errors=True)
        assert files(home) == before, title
    texts = "\n".join(found).replace(str(home), "HOME")
    assert_golden("errors/finetune.txt", re.sub(r"\b[0-9a-f]{12}\b", "DIGEST", texts))


def refused(title: str, words: list[str], text: str, capsys: Captured) -> str:
    capsys.readouterr()
    assert run(words) == 2, title
    captured = capsys.readouterr()
    assert captured.out == "", title
    assert "where:" in captured.err and "hint:" in captured.err, title
    return f"# {title}\n$ meshwright {text}\n{captured.err}"
