"""`meshwright data pack --chat` and `inspect` of chats: what is trained is shown, bad input exits 2."""

import json
from pathlib import Path

import pytest
from tests.support.chat_templates import FAMILIES, THINKING, write_tokenizer

from meshwright.cli.main import run

QWEN = next(family for family in FAMILIES if family.name == "qwen-2.5")
CHAT = {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4\nor four"}]}
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path / "model", QWEN, template=QWEN.template)


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(CHAT) + "\n" for _ in range(3)))
    return path


def pack(chats: Path, model: Path, *options: str) -> int:
    output = str(chats.parent / "data")
    return run(
        ["data", "pack", str(chats), "--chat", "auto", "--tokenizer", str(model), "-o", output, *options]
    )


def test_pack_says_what_is_trained(chats: Path, model: Path, capsys: Capture) -> None:
    assert pack(chats, model) == 0
    out = capsys.readouterr().out
    assert "<|im_end|> is trained (3 turns)" in out
    assert "every answer is trained; prefix rendering, chat template" in out
    assert "data.packing=whole" in out


def test_inspect_marks_the_trained_spans(chats: Path, model: Path, capsys: Capture) -> None:
    assert pack(chats, model, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["num_samples"] == 3 and facts["chat"]["kind"] == "chats"
    data = str(chats.parent / "data")
    assert run(["data", "inspect", data, "--samples", "1", "--seq", "4"]) == 0
    out = capsys.readouterr().out
    assert "  | ⟦4\n  | or four<|im_end|>⟧\n" in out
    assert "3 samples are longer; 3 would lose all targets" in out
    assert "conversation 0" in out and "conversation 1" not in out
    assert run(["data", "inspect", data, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["conversations"][0]
    assert [span["text"] for span in shown["spans"] if span["weight"]] == ["4\nor four<|im_end|>"]


def test_a_date_and_variables_reach_the_template(chats: Path, model: Path, capsys: Capture) -> None:
    template = chats.parent / "dated.jinja"
    template.write_text(
        "{{ strftime_now('%d.%m.%Y') }} {{ thinking }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    options = (
        "--template",
        str(template),
        "--date",
        "2024-07-26",
        "--template-var",
        "thinking=false",
        "--train",
        "all",
    )
    assert pack(chats, model, *options) == 0
    assert "date 2024-07-26" in capsys.readouterr().out
    assert run(["data", "inspect", str(chats.parent / "data"), "--samples", "1"]) == 0
    assert "26.07.2024 False" in capsys.readouterr().out


def test_a_special_token_that_the_tokenizer_does_not_name_is_said(
    chats: Path, model: Path, capsys: Capture
) -> None:
    """Jinja writes nothing for `{{ bos_token }}` without a value: the dataset would have no BOS."""
    (model / "chat_template.jinja").write_text("{{ bos_token }}" + QWEN.template)
    assert pack(chats, model) == 0
    out = capsys.readouterr().out
    assert "not written  bos_token: tokenizer_config.json names none" in out and "eos_token" not in out


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--longer", "drop"), "without --seq no sample is too long"),
        (("--date", "yesterday"), "'yesterday' is no date"),
        (("--template-var", "x"), "'x' is no variable"),
        (("--field", "content"), "this has no effect"),
        (("--format", "megatron"), "no loss weights"),
        (("--seq", "8"), "more than the 8 of a sequence"),
        (("--chat", "alpaca"), "no 'instruction', which the format alpaca needs"),
        (("--dataset-split", "train"), "a split has no effect\n  where: --dataset-split"),
    ],
)
def test_options_that_cannot_work_are_refused(
    options: tuple[str, ...], expected: str, chats: Path, model: Path, capsys: Capture
) -> None:
    assert pack(chats, model, *options) == 2
    assert expected in capsys.readouterr().err
    assert not (chats.parent / "data").exists()


def test_options_of_chats_need_chat(chats: Path, model: Path, capsys: Capture) -> None:
    command = ["data", "pack", str(chats), "-o", str(chats.parent / "data"), "--tokenizer", str(model)]
    for option in (("--train", "last"), ("--seq", "64"), ("--template-var", "a=1"), ("--dataset-split", "x")):
        assert run([*command, *option]) == 2
        err = capsys.readouterr().err
        assert "add `--chat auto`" in err and f"where: {option[0]}\n" in err
    assert run(command) == 2
    assert "these are chats: add `--chat auto`" in capsys.readouterr().err


def test_a_refused_turn_is_named(chats: Path, tmp_path: Path, capsys: Capture) -> None:
    turns = [*CHAT["messages"], {"role": "user", "content": "sure?"}, {"role": "assistant", "content": "yes"}]
    chats.write_text(json.dumps({"messages": turns}))
    model = write_tokenizer(tmp_path / "thinking", QWEN, template=THINKING)
    assert pack(chats, model) == 2
    err = capsys.readouterr().err
    assert f"{chats}:1, turn 2 (assistant)" in err and "--train last" in err
    assert pack(chats, model, "--train", "last") == 0


def test_the_byte_tokenizer_has_no_turns(chats: Path, capsys: Capture) -> None:
    assert run(["data", "pack", str(chats), "--chat", "auto", "-o", str(chats.parent / "data")]) == 2
    assert "--tokenizer path/to/model" in capsys.readouterr().err


def test_seq_needs_chats(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "a.txt").write_text("text")
    assert run(["data", "pack", str(tmp_path / "a.txt"), "-o", str(tmp_path / "data")]) == 0
    assert run(["data", "inspect", str(tmp_path / "data"), "--seq", "8"]) == 2
    assert "--seq has no effect" in capsys.readouterr().err


def test_a_variable_that_the_template_does_not_read_is_refused(
    chats: Path, model: Path, capsys: Capture
) -> None:
    assert pack(chats, model, "--template-var", "enable_thinkng=false") == 2
    assert "reads no variable 'enable_thinkng'" in capsys.readouterr().err


def test_stats_are_of_whole_samples(chats: Path, model: Path, capsys: Capture) -> None:
    """Chats are never cut, so the numbers of cut sequences would be of no run."""
    assert pack(chats, model) == 0
    capsys.readouterr()
    data = str(chats.parent / "data")
    assert run(["data", "stats", data, "--seq", "256", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    longest, packing = facts["document_tokens"]["longest"], facts["packing"]
    assert packing["num_sequences"] == -(-3 // (256 // longest))
    assert packing["whole_share"] == facts["num_tokens"] / (256 * packing["num_sequences"])
    manifest = json.loads((chats.parent / "data" / "dataset.json").read_text())
    trained = manifest["chat"]["num_trained"]
    assert packing["trained_share"] == trained / (256 * packing["num_sequences"])
    assert run(["data", "stats", data, "--seq", str(longest - 1)]) == 0
    assert "every sample is longer" in capsys.readouterr().out


def test_stats_name_special_tokens(chats: Path, model: Path, capsys: Capture) -> None:
    chats.write_text(json.dumps({"messages": CHAT["messages"] * 9}) + "\n")
    assert pack(chats, model) == 0
    capsys.readouterr()
    assert run(["data", "stats", str(chats.parent / "data")]) == 0
    assert "'<|im_end|>'" in capsys.readouterr().out


def test_stats_of_pairs_keep_both_answers_together(chats: Path, model: Path, capsys: Capture) -> None:
    pair = {"prompt": [{"role": "user", "content": "2 + 2?"}], "chosen": "4", "rejected": "5 or six"}
    chats.write_text(json.dumps(pair) + "\n")
    assert pack(chats, model) == 0
    capsys.readouterr()
    assert run(["data", "stats", str(chats.parent / "data"), "--seq", "100", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["document_tokens"]["longest"] < 100 < facts["num_tokens"]
    assert (facts["packing"]["num_sequences"], facts["packing"]["num_longer"]) == (0, 1)
