"""`meshwright data` for tar shards, tables, lines and Megatron pairs."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from tests.support.run_files import write_run_file
from tests.support.tar_shards import write_shards, write_tar

from meshwright.cli.main import run
from meshwright.data.readers.megatron import MegatronTokens

Image = pytest.importorskip("PIL.Image")


def picture(colour: tuple[int, int, int]) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (320, 200), colour).save(stream, "JPEG")
    return stream.getvalue()


def record_text(source: MegatronTokens, index: int) -> bytes:
    tokens = source.record(index)["tokens"]
    assert isinstance(tokens, np.ndarray)
    return bytes(tokens[:-1].tolist())


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    files = {}
    for number in range(12):
        files[f"{number:04d}.jpg"] = picture((20 * number, 255 - 20 * number, 128))
        files[f"{number:04d}.txt"] = f"<b>picture</b> {number}".encode()
    write_tar(tmp_path / "shards" / "a.tar", files)
    return tmp_path / "shards"


def test_index_inspect_stats_and_verify_of_shards(pictures: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["data", "inspect", str(pictures)]) == 2
    assert f"meshwright data index {pictures}" in capsys.readouterr().err
    assert run(["data", "index", str(pictures), "--json", "--processes", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["num_samples"] == 12
    assert run(["data", "inspect", str(pictures), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["format"], facts["num_records"]) == ("tar shards", 12)
    assert facts["first_records"][1]["txt"] == "<b>picture</b> 1"
    assert run(["data", "inspect", str(pictures), "--samples", "1"]) == 0
    assert "records      12" in capsys.readouterr().out
    assert run(["data", "stats", str(pictures)]) == 0
    assert "bytes per record" in capsys.readouterr().out
    assert run(["data", "verify", str(pictures)]) == 0
    assert "intact" in capsys.readouterr().out


def test_a_page_shows_pictures_and_escapes_text(pictures: Path, tmp_path: Path) -> None:
    assert run(["data", "index", str(pictures), "--processes", "1", "--quiet"]) == 0
    assert run(["data", "inspect", str(pictures), "--html", str(tmp_path / "p.html"), "--samples", "5"]) == 0
    page = (tmp_path / "p.html").read_text()
    assert page.count("data:image/jpeg;base64,") == 5
    assert "&lt;b&gt;picture&lt;/b&gt; 11" in page and "<b>picture" not in page


def test_verify_names_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_shards(tmp_path / "shards")
    assert run(["data", "index", str(folder), "--processes", "1"]) == 0
    offsets = np.fromfile(folder / "shard-0001.tar.idx", dtype="<u8")
    offsets[1] += 512
    offsets.tofile(folder / "shard-0001.tar.idx")
    capsys.readouterr()
    assert run(["data", "verify", str(folder), "--json"]) == 2
    assert "sample 1 begins at" in json.loads(capsys.readouterr().out)["damage"][0]


def test_text_to_megatron(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    command = [
        "data",
        "pack",
        str(tmp_path / "a.txt"),
        "--split",
        "blank-line",
        "-o",
        str(tmp_path / "corpus"),
    ]
    assert run([*command, "--format", "megatron"]) == 0
    source = MegatronTokens(tmp_path / "corpus")
    assert [record_text(source, index) for index in (0, 1)] == [b"one\n", b"two\n"]
    assert {path.name for path in tmp_path.iterdir()} == {"a.txt", "corpus.bin", "corpus.idx"}
    assert run([*command, "--format", "megatron"]) == 2
    assert "never overwritten" in capsys.readouterr().err
    assert run(["data", "verify", str(tmp_path / "corpus")]) == 0
    capsys.readouterr()
    assert run(["data", "stats", str(tmp_path / "corpus"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["format"], facts["unit"], facts["lengths"]["longest"]) == ("Megatron tokens", "tokens", 5)


def test_lines_are_indexed_and_broken_ones_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text"\n')
    assert run(["data", "index", str(tmp_path / "a.jsonl")]) == 0
    assert "2 lines" in capsys.readouterr().out
    assert run(["data", "verify", str(tmp_path / "a.jsonl")]) == 2
    assert "a.jsonl:2" in capsys.readouterr().err


def test_packing_with_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"text {n}"}) + "\n" for n in range(50)))
    command = ["data", "pack", str(tmp_path / "a.jsonl"), "-o", str(tmp_path / "data"), "--processes", "2"]
    assert run([*command, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["num_documents"], facts["path"]) == (50, str(tmp_path / "data"))
    assert facts["document_tokens"]["percentiles"][-1] == len("text 49") + 1


def test_blend_prints_exact_shares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_run_file(tmp_path / "run.yaml")
    blend = (
        "data.blend=[{synthetic: {num_documents: 50}, weight: 0.7}, "
        "{synthetic: {num_documents: 20, seed: 1}, weight: 0.3}]"
    )
    command = ["data", "blend", str(recipe), "data.synthetic=null", "data.holdout_sequences=0", blend]
    assert run([*command, "--steps", "100", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    total = facts["num_samples"]
    assert [each["num_samples"] for each in facts["datasets"]] == [
        pytest.approx(0.7 * total, abs=1),
        pytest.approx(0.3 * total, abs=1),
    ]
    assert run([*command, "--steps", "100"]) == 0
    assert "70.00%" in capsys.readouterr().out


def test_a_megatron_pair_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("one two three\n" * 2000)
    assert (
        run(["data", "pack", str(tmp_path / "a.txt"), "-o", str(tmp_path / "c"), "--format", "megatron"]) == 0
    )
    recipe = write_run_file(tmp_path / "run.yaml")
    settings = ["data.synthetic=null", f"data.path={tmp_path / 'c'}", "data.holdout_sequences=0"]
    capsys.readouterr()
    assert run(["data", "blend", recipe, *settings, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["datasets"][0]["name"] == str(tmp_path / "c")
    assert facts["datasets"][0]["samples_per_epoch"] > 10
