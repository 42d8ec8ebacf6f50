"""`meshwright launch`."""

import json
from pathlib import Path

import pytest

from meshwright.cli import main
from meshwright.spec.text import load_run

Captured = pytest.CaptureFixture[str]
RUN = "llama-3.1-8b-8gpu"


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_slurm_with_the_predicted_time(capsys: Captured):
    words = ["launch", RUN, "schedule.num_steps=600", "--site", "leonardo", "--account", "course", "--json"]
    assert main.run(words) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["nodes"], document["ranks_per_node"], document["job_id"]) == (2, 4, None)
    assert document["limit_minutes"] * 60 > 1.25 * document["predicted_seconds"] > 0
    text = Path("launch", RUN, "job.sbatch").read_text()
    assert "#SBATCH --account=course" in text
    assert "srun --gpu-bind=none" in text
    assert load_run(f"launch/{RUN}/run.yaml").schedule.num_steps == 600


@pytest.mark.parametrize(
    "via", ["slurm", "mpi", "torchrun", "kubernetes", "docker", "accelerate", "deepspeed"]
)
def test_every_launcher_prints_its_command(via: str, capsys: Captured):
    assert main.run(["launch", RUN, "--via", via, "--image", "x", "--hosts", "a", "-o", "out"]) == 0
    captured = capsys.readouterr()
    assert captured.out
    assert "written: out/run.yaml" in captured.err


def test_write_may_be_said_and_options_may_come_first(capsys: Captured):
    assert main.run(["launch", "write", RUN, "--via", "mpi"]) == 0
    assert main.run(["launch", "--via", "mpi", RUN]) == 0
    assert "mpirun -np 8" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "text", "code"),
    [
        ([RUN, "--nodes", "3"], "3 nodes of 8 GPUs have 24", 2),
        ([RUN, "--via", "pbs"], "there is no launcher 'pbs'", 2),
        ([RUN, "--via", "mpi", "--submit"], "mpi has no queue to submit to", 2),
        ([RUN, "--via", "docker"], "no image is named", 2),
        ([RUN, "--container", "pyxis"], "--container without --image", 2),
        ([RUN, "--image", "x", "--container", "podman"], "container.kind", 2),
        ([RUN, "--time", "soon"], "--time", 2),
        ([RUN, "--hosts", "a", "--hostfile", "b"], "hosts are named twice", 2),
        ([RUN, "--via", "torchrun", "--rendezvous", "etcd"], "there is no rendezvous 'etcd'", 2),
        ([RUN, "--via", "kubernetes", "--image", "x", "--kind", "pod"], "there is no kind of job 'pod'", 2),
        ([RUN, "--site", "leonarda"], "did you mean 'leonardo'?", 2),
        ([RUN, "-o", "/proc/none"], "the files cannot be written", 2),
        (["status", "nowhere"], "no job was submitted from here", 2),
        (["logs", "nowhere"], "no job was submitted from here", 2),
    ],
)
def test_wrong_input(words: list[str], text: str, code: int, capsys: Captured):
    assert main.run(["launch", *words]) == code
    captured = capsys.readouterr()
    assert text in captured.err
    assert "where:" in captured.err
    assert captured.out == ""


def test_a_hostfile_with_a_dead_host_is_refused(tmp_path: Path, capsys: Captured):
    hostfile = tmp_path / "hosts.txt"
    hostfile.write_text("no-such-host.invalid slots=8\n")
    words = ["launch", RUN, "--via", "mpi", "--hostfile", str(hostfile), "--check-hosts"]
    assert main.run(words) == 2
    captured = capsys.readouterr()
    assert "host no-such-host.invalid does not answer on port 22" in captured.err and captured.out == ""


def test_submit_prints_the_job_id_and_refusals_exit_4(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
):
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    assert main.run(["launch", RUN, "--submit"]) == 2
    assert "sbatch is not installed here" in capsys.readouterr().err
    (programs / "sbatch").write_text("#!/bin/bash\necho 4711\n")
    (programs / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    assert main.run(["launch", RUN, "--submit"]) == 0
    assert capsys.readouterr().out == "4711\n"
    (programs / "sbatch").write_text("#!/bin/bash\necho 'invalid account' >&2\nexit 1\n")
    assert main.run(["launch", RUN, "--submit"]) == 4
    assert "sbatch refused: invalid account" in capsys.readouterr().err
