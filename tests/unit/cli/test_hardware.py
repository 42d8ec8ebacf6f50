"""`hardware list` and `hardware compare` as a person and as a program use them."""

import json
from pathlib import Path

import pytest

from meshwright.cli.main import run
from meshwright.hardware import cluster_names, device_names


def _run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = run(arguments)
    out, err = capsys.readouterr()
    return code, out, err


def test_every_device_and_cluster_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = _run(["hardware", "list"], capsys)
    names = [line.split()[0] for line in out.splitlines() if line]
    assert code == 0
    assert names == ["device", *device_names(), "cluster", *cluster_names()]
    assert max(map(len, out.splitlines())) < 120
    t4 = next(line for line in out.splitlines() if line.startswith("t4 "))
    assert "65 fp16" in t4, "it has no bf16"


def test_sources_stand_beside_the_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = _run(["hardware", "list", "--sources"], capsys)
    assert code == 0
    assert "NVLink 4, 900 GB/s both directions together" in out


def test_json_holds_every_number_and_source(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = _run(["hardware", "list", "--json"], capsys)
    found = json.loads(out)
    assert code == 0
    assert found["devices"]["h100"]["peak_flops_per_second"]["bf16"] == 9.894e14
    assert found["clusters"]["leonardo"]["device"] == "a100-64gb"
    assert found["devices"]["h100"]["sources"]["num_sms"] == "Hopper white paper"


def test_a_profile_is_shown_beside_the_catalogue(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = tmp_path / "p.json"
    profile.write_text(json.dumps({"device": "h200", "copy_bytes_per_second": 4.0e12}))
    code, out, _ = _run(["hardware", "compare", str(profile), "--json"], capsys)
    found = json.loads(out)
    assert code == 0
    assert found["memory, TB/s"]["measured"] == 4.0
    assert found["memory, TB/s"]["catalogue"] == pytest.approx(0.8 * 4.8)
    code, out, _ = _run(["hardware", "compare", str(profile)], capsys)
    assert code == 0 and "peer link, GB/s" in out


def test_a_missing_profile_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = _run(["hardware", "compare", "none.json"], capsys)
    assert (code, out) == (2, "") and "none.json" in err


NEW = ["hardware", "new", "--node", "8 x h100"]


def test_new_writes_a_cluster_that_plan_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = _run([*NEW, "--network", "400 per node", "--storage", "50", "-o", "mine.toml"], capsys)
    assert code == 0 and "6.25 GB/s of network per device" in out and "mine.toml:4" in err
    code, out, err = _run(["plan", "llama-3.2-1b", "--on", "mine.toml:2", "--seq", "2048"], capsys)
    assert code == 0 and "A checkpoint of 13.8 GiB takes 297 ms to write at 50 GB/s." in out
    assert "Saves in the background copy it to host memory: " in out
    assert "of host memory per node" in err and "a network of" not in err


def test_an_assumed_network_is_among_the_assumptions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert _run(NEW, capsys)[0] == 0
    _, _, err = _run(["plan", "llama-3.2-1b", "--on", "cluster.toml:2", "--seq", "2048"], capsys)
    assert "assumed: a network of 50 GB/s per device and direction" in err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["hardware", "new"], "--node '8 x h100'"),
        ([*NEW, "--network", "400"], "per node"),
        (["hardware", "new", "--node", "8 x h1000"], "did you mean 'h100'"),
        ([*NEW, "-o", "mine.yaml"], "does not end in .toml"),
        ([*NEW, "-o", "none/mine.toml"], "folder does not exist"),
        ([*NEW, "--name", "my cluster"], "no name of a cluster"),
        ([*NEW, "-o", "old.toml"], "already exists"),
    ],
)
def test_new_refuses(
    arguments: list[str],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("old.toml").write_text("mine")
    code, out, err = _run(arguments, capsys)
    assert (code, out) == (2, "") and text in err
    assert Path("old.toml").read_text() == "mine"


def test_new_overwrites_with_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cluster.toml").write_text("old")
    assert _run([*NEW, "--force"], capsys)[0] == 0
    assert "h100" in Path("cluster.toml").read_text()


def test_new_asks_a_person_and_asks_again_after_a_wrong_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    answers = iter(["8 x h200", "450", "3200", "3200 per node", "2TB", "not known"])
    asked: list[str] = []

    def answer(question: str, **_: object) -> str:
        asked.append(question)
        return next(answers)

    monkeypatch.setattr("typer.prompt", answer)
    code, out, err = _run(["hardware", "new"], capsys)
    assert code == 0 and "50 GB/s of network per device" in out
    assert [question[:2] for question in asked] == ["1.", "2.", "3.", "3.", "  ", "  "]
    assert "does not say whether" in err
    assert next(answers, None) is None
