"""`profile`: what it writes and prints on a CPU, and what it refuses."""

import gzip
import json
from pathlib import Path

import pytest
from tests.support.run_files import write_run_file

from meshwright.cli.main import run as run_command


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a profile with an odd width."""
    folder = tmp_path_factory.mktemp("profile")
    file = write_run_file(folder / "run.yaml")
    words = ["profile", file, "schedule.num_steps=50", "--steps", "3,1,1", "--out", str(folder / "out")]
    assert run_command(words) == 0
    return folder / "out"


def test_a_profile_on_a_cpu_has_all_its_files(profiled: Path) -> None:
    names = {path.name for path in profiled.iterdir()}
    assert names == {"profile.json", "profile.html", "trace-rank0.json.gz", "stacks-rank0.json.gz"}
    with gzip.open(profiled / "stacks-rank0.json.gz") as stream:
        events = json.load(stream)["traceEvents"]
    assert any(event.get("cat") == "python_function" for event in events)


def test_the_figures_of_a_step_add_up(profiled: Path) -> None:
    found = json.loads((profiled / "profile.json").read_text())
    assert not found["is_cuda"] and found["tensor_core_share"] is None and found["is_timed"]
    assert any("no tensor cores" in line for line in found["verdict"])
    assert sum(found["breakdown"].values()) == pytest.approx(found["shares_of_seconds"])
    assert found["breakdown"]["backward"] > 0 and found["breakdown"]["update"] > 0
    by_kind = {row["kind"]: row for row in found["classes"]}
    assert {"matmul", "element-wise", "optimizer"} <= set(by_kind)
    assert by_kind["matmul"]["flops"] > 0.5 * sum(row["flops"] or 0 for row in found["classes"])
    memory = found["memory"]["peak_by_category"]
    assert memory["parameters"] > 0 and memory["optimizer state"] > 0 and memory["activations"] > 0


def test_another_profile_needs_another_folder_or_overwrite(
    profiled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(profiled.parent / "run.yaml")
    assert run_command(["profile", file, "schedule.num_steps=50", "--out", str(profiled)]) == 2
    assert "--overwrite" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--steps", "3,1"], "is not three numbers"),
        (["--steps", "a,b,c"], "is not three numbers"),
        (["--steps", "3,0,1"], "cannot be profiled"),
        (["--steps", "3,1,0"], "cannot be profiled"),
        (["--steps", "8,1,2"], "the run has 4 steps, and the profile makes 13"),
        (["--ranks", "1", "schedule.num_steps=50"], "there is no rank 1: the run has 1"),
        (["--ranks", "x", "schedule.num_steps=50"], "is no list of ranks"),
    ],
)
def test_what_cannot_be_profiled_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], text: str
) -> None:
    file = write_run_file(tmp_path / "run.yaml")
    assert run_command(["profile", file, *words, "--out", str(tmp_path / "out")]) == 2
    assert text in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_run_file(tmp_path / "run.yaml")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/notes.txt").write_text("mine")
    words = ["profile", file, "schedule.num_steps=50", "--overwrite", "--out", str(tmp_path / "out")]
    assert run_command(words) == 2
    assert "no profile is among them" in capsys.readouterr().err
    assert (tmp_path / "out/notes.txt").exists()
