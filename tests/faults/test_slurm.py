"""A real SLURM with two nodes on this machine: a submitted job, its requeue, and its cancellation."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

LAB = Path(__file__).parents[1] / "support/slurm_lab.sh"
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "scancel", "ip", "nsenter")
SITE = """
gpus_per_node = 1
cpus_per_gpu = 1
gpu_request = "none"
partition = "low"
max_hours = 1
srun_options = ["--mpi=none"]
[environment]
GLOO_SOCKET_IFNAME = "eth0"
"""
RUN = ["demo", "schedule.num_steps=12", "schedule.warmup_steps=4", "checkpoint.every_steps=1000"]
RUN += ["observe.evaluate=null", "data.synthetic={num_documents: 300}"]
TWO_RANKS = "parallel={dp_replicate: 2}"


def missing() -> str:
    """Why there can be no SLURM here; empty where there can."""
    if os.geteuid() != 0:
        return "not root"
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    programs = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    if programs:
        return f"{', '.join(programs)} not installed (.ci/install_slurm)"
    if Path("/sys/class/net/mwbr0").exists():
        return "another test run has one"
    return ""


pytestmark = pytest.mark.skipif(bool(missing()), reason=f"SLURM NOT TRIED: {missing()}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a site's profile, and SLURM running for as long as the tests here do."""
    place, lab = tmp_path_factory.mktemp("project"), tmp_path_factory.mktemp("lab")
    (place / "site.toml").write_text(SITE)
    before = dict(os.environ)
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    os.environ["SLURM_CONF"] = str(lab / "slurm.conf")
    try:
        up = subprocess.run([LAB, "up", lab], capture_output=True, text=True, timeout=90)
        if up.returncode != 0:
            pytest.skip(f"SLURM NOT TRIED: it does not start here: {up.stderr[-500:]}")
        yield place
    finally:
        subprocess.run([LAB, "down", lab], capture_output=True, timeout=60)
        os.environ.clear()
        os.environ.update(before)


def meshwright(folder: Path, *words: str) -> str:
    command = [sys.executable, "-m", "meshwright", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def submitted(folder: Path, name: str) -> str:
    words = ["launch", *RUN, TWO_RANKS, f"name={name}", "--site", "site.toml", "--submit"]
    return meshwright(folder, *words)


def state(job_id: str) -> str:
    """What the controller says, without a start of Python for each look."""
    return subprocess.run(["scontrol", "show", "job", job_id], capture_output=True, text=True).stdout


def wait_for(is_there: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 120
    while not is_there():
        assert time.monotonic() < end, f"{what}: not within two minutes"
        time.sleep(0.5)


def losses(folder: Path, name: str) -> list[float]:
    file = folder / "runs" / name / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line)["loss"] for line in lines if line.endswith("}")]


@pytest.fixture(scope="module")
def one_process(folder: Path) -> list[float]:
    meshwright(folder, "train", *RUN, "parallel={}", "name=single")
    return losses(folder, "single")


def test_two_nodes_have_the_losses_of_one_process(folder: Path, one_process: list[float]):
    job_id = submitted(folder, "plain")
    wait_for(lambda: "=COMPLETED" in state(job_id), "the job's end")
    assert losses(folder, "plain") == pytest.approx(one_process, rel=1e-5)
    assert "2 ranks on cpu" in meshwright(folder, "launch", "logs", "launch/plain")
    assert meshwright(folder, "launch", "status", job_id) == f"{job_id} COMPLETED"


def test_a_job_at_its_time_limit_is_saved_requeued_and_continued(folder: Path, one_process: list[float]):
    """The signal that SLURM sends before the limit, sent earlier."""
    job_id = submitted(folder, "limit")
    wait_for(lambda: len(losses(folder, "limit")) >= 2, "the first steps")
    subprocess.run(["scancel", "--signal=USR1", job_id], check=True)
    wait_for(lambda: "=PENDING Reason=BeginTime" in state(job_id), "the requeue")
    subprocess.run(["scontrol", "update", f"JobId={job_id}", "StartTime=now"], check=True)
    wait_for(lambda: "=COMPLETED" in state(job_id), "the job's end")
    assert "resumed at step" in meshwright(folder, "launch", "logs", "launch/limit")
    assert losses(folder, "limit") == pytest.approx(one_process, rel=1e-5)


def test_a_cancelled_job_is_not_requeued(folder: Path):
    job_id = submitted(folder, "cancelled")
    wait_for(lambda: len(losses(folder, "cancelled")) >= 1, "the first step")
    subprocess.run(["scancel", job_id], check=True)
    wait_for(lambda: "=CANCELLED" in state(job_id), "the cancellation")
    time.sleep(3)
    assert "CANCELLED" in meshwright(folder, "launch", "status", "launch/cancelled")


def test_a_refusal_of_the_controller_is_shown(folder: Path):
    words = ["launch", *RUN, TWO_RANKS, "--site", "site.toml", "--partition", "none", "--submit"]
    command = [sys.executable, "-m", "meshwright", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 4
    assert "invalid partition specified: none" in done.stderr
