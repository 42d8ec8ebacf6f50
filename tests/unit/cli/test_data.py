"""`meshwright data`: data on stdout, talk on stderr, damage is exit code 2."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.cli.main import run
from meshwright.data.corpus import document_text


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "stories.txt"
    path.write_text("\n".join(document_text(0, index) for index in range(20)))
    return path


@pytest.fixture
def dataset(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert run(["data", "pack", str(text), "-o", str(tmp_path / "data"), "--split", "blank-line"]) == 0
    capsys.readouterr()
    return tmp_path / "data"


def one_json(captured: str) -> dict[str, object]:
    document = json.loads(captured)
    assert isinstance(document, dict)
    return document


def test_pack_prints_what_it_wrote(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["data", "pack", str(text), "-o", str(tmp_path / "data"), "--split", "blank-line", "--json"]
    assert run(command) == 0
    facts = one_json(capsys.readouterr().out)
    assert facts["num_documents"] == 20
    assert facts["vocab_size"] == 257
    assert facts["path"] == str(tmp_path / "data")


def test_inspect_shows_counts_lengths_and_text(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["data", "inspect", str(dataset), "--documents", "1"]) == 0
    out = capsys.readouterr().out
    assert "documents by length in tokens" in out
    assert "█" in out
    assert document_text(0, 0).splitlines()[0] in out
    assert "document 1" not in out
    assert run(["data", "inspect", str(dataset), "--json"]) == 0
    facts = one_json(capsys.readouterr().out)
    assert sum(bar["num_documents"] for bar in facts["histogram"]) == 20
    assert len(facts["first_documents"]) == 2


def test_stats_count_and_price_a_sequence_length(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["data", "stats", str(dataset), "--seq", "256", "--json"]) == 0
    facts = one_json(capsys.readouterr().out)
    assert 2.5 < facts["unigrams"]["entropy_nats"] < 3.5
    assert facts["packing"]["num_sequences"] == (facts["num_tokens"] - 1) // 256
    assert 0.99 < facts["packing"]["target_share"] < 1
    assert run(["data", "stats", str(dataset)]) == 0
    assert "unigram entropy" in capsys.readouterr().out


def test_stats_of_a_sequence_longer_than_the_data(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["data", "stats", str(dataset), "--seq", "1000000"]) == 0
    assert "shorter than one sequence" in capsys.readouterr().out


def test_verify_of_a_sound_dataset(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["data", "verify", str(dataset)]) == 0
    assert "intact" in capsys.readouterr().out
    assert run(["data", "verify", str(dataset), "--json"]) == 0
    assert one_json(capsys.readouterr().out)["intact"] is True


@pytest.mark.parametrize("name", ["tokens.bin", "documents.bin"])
@pytest.mark.parametrize("change", ["bit", "truncated", "missing"])
def test_verify_of_damage(dataset: Path, capsys: pytest.CaptureFixture[str], name: str, change: str) -> None:
    content = bytearray((dataset / name).read_bytes())
    content[0] ^= 1
    (dataset / name).write_bytes(content if change == "bit" else content[:-1])
    if change == "missing":
        (dataset / name).unlink()
    assert run(["data", "verify", str(dataset)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert name in captured.err
    assert run(["data", "verify", str(dataset), "--json"]) == 2
    facts = one_json(capsys.readouterr().out)
    assert facts["intact"] is False
    assert name in str(facts["damage"])


@pytest.mark.parametrize(
    ("words", "fact"),
    [
        (["inspect", "nowhere"], "there is no dataset here"),
        (["stats", "stories.txt"], "this is a file"),
        (["pack", "nowhere", "-o", "new"], "no such file or folder"),
        (["pack", "stories.txt", "-o", "stories.txt"], "never overwritten"),
        (["pack", "stories.txt", "-o", "new", "--field", "x"], "--field has no effect"),
        (["pack", "stories.txt", "-o", "new", "--eos", "x"], "--eos has no effect"),
        (["pack", "stories.txt", "-o", "new", "--tokenizer", "gpt5"], "there is no tokenizer here"),
        (["pack", "stories.txt", "-o", "new", "--split", "never"], "never"),
        (["inspect", "nowhere", "--json"], "there is no dataset here"),
    ],
)
def test_bad_input_is_a_fact_on_stderr(
    text: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    fact: str,
) -> None:
    monkeypatch.chdir(text.parent)
    assert run(["data", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert fact in captured.err
    assert [path.name for path in text.parent.iterdir()] == ["stories.txt"]


def test_data_never_steers_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("before \x1b[2J after")
    assert run(["data", "pack", str(tmp_path / "a.txt"), "-o", str(tmp_path / "data")]) == 0
    assert run(["data", "inspect", str(tmp_path / "data")]) == 0
    out = capsys.readouterr().out
    assert "before ·[2J after" in out
    assert "\x1b" not in out


def test_the_verbs_import_no_torch(dataset: Path) -> None:
    program = (
        "import sys; from meshwright.cli.main import run\n"
        f"for verb in ('inspect', 'stats', 'verify'): assert run(['data', verb, {str(dataset)!r}]) == 0\n"
        "assert 'torch' not in sys.modules and 'tokenizers' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=False).returncode == 0
