"""A real SLURM with two nodes on this machine: jobs, preemption, a lost node, and cancellation."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.nodes import NODE_LAB, SLURM_LAB, lacking, nodes_alone

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "scancel")
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
RUN = ["demo", "schedule.num_steps=20", "schedule.warmup_steps=4", "checkpoint.every_steps=1000"]
RUN += ["observe.evaluate=null", "data.synthetic={num_documents: 300}"]
TWO_RANKS = "parallel={dp_replicate: 2}"


LACKING = lacking(PROGRAMS)
pytestmark = pytest.mark.skipif(bool(LACKING), reason=f"SLURM NOT TRIED: {LACKING}")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """SLURM, running for as long as the tests here do."""
    place = tmp_path_factory.mktemp("lab")
    with nodes_alone():
        os.environ["SLURM_CONF"] = str(place / "slurm.conf")
        try:
            up = subprocess.run([SLURM_LAB, "up", place], capture_output=True, text=True, timeout=90)
            if up.returncode != 0:
                pytest.skip(f"SLURM NOT TRIED: it does not start here: {up.stderr[-500:]}")
            yield place
        finally:
            subprocess.run([SLURM_LAB, "down", place], capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def folder(lab: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a site's profile."""
    place = tmp_path_factory.mktemp("project")
    (place / "site.toml").write_text(SITE)
    return place


def meshwright(folder: Path, *words: str) -> str:
    command = [sys.executable, "-m", "meshwright", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def submitted(folder: Path, name: str, *changes: str) -> str:
    words = ["launch", *RUN, TWO_RANKS, f"name={name}", *changes, "--site", "site.toml", "--submit"]
    return meshwright(folder, *words)


def state(job_id: str) -> str:
    """What the controller says, without a start of Python for each look."""
    return subprocess.run(["scontrol", "show", "job", job_id], capture_output=True, text=True).stdout


def wait_for(is_there: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 300
    while not is_there():
        assert time.monotonic() < end, f"{what}: not within five minutes"
        time.sleep(0.2)


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
    warn(job_id)
    continued(job_id)
    assert "resumed at step" in meshwright(folder, "launch", "logs", "launch/limit")
    assert losses(folder, "limit") == pytest.approx(one_process, rel=1e-5)


def test_a_job_at_its_time_limit_before_the_first_step_is_requeued(folder: Path):
    """Ranks that are still importing and building have no handler yet: the signal ends them."""
    job_id = submitted(folder, "early")
    wait_for(lambda: "State=RUNNING" in steps(job_id), "the start of the ranks")
    wait_for(lambda: warned_until_requeued(job_id), "the requeue")
    assert not losses(folder, "early")
    subprocess.run(["scancel", job_id], check=True)


def warn(job_id: str) -> None:
    subprocess.run(["scancel", "--signal=USR1", job_id], check=True)


def warned_until_requeued(job_id: str) -> bool:
    """Whether the job is requeued; else it is warned again. A step that SLURM calls running may not have
    started its program yet, and a signal of that moment is lost."""
    if "Restarts=1" in state(job_id):
        return True
    subprocess.run(["scancel", "--signal=USR1", job_id], check=False, capture_output=True)
    time.sleep(0.5)
    return False


def steps(job_id: str) -> str:
    return subprocess.run(["scontrol", "show", "step", f"{job_id}.0"], capture_output=True, text=True).stdout


def continued(job_id: str) -> None:
    """Wait for the end of a requeued job. It starts after seconds, where SLURM would hold it for two minutes.

    A node refuses the new start of a job within the second in which it ended the old one ("Job credential
    revoked"), and the job has then failed. SLURM's two minutes keep jobs out of that second.
    """
    is_moved = False

    def is_complete() -> bool:
        nonlocal is_moved
        now = state(job_id)
        if "Reason=BeginTime" in now and not is_moved:
            update = ["scontrol", "update", f"JobId={job_id}", "StartTime=now+4"]
            is_moved = subprocess.run(update, capture_output=True).returncode == 0
        assert "=FAILED" not in now, now
        return "=COMPLETED" in now and "Restarts=0" not in now

    wait_for(is_complete, f"the end of the requeued job: {state(job_id)}")


def test_a_preempted_job_is_saved_requeued_and_continued(folder: Path, one_process: list[float]):
    """A job of a partition with a higher priority takes the nodes: SLURM sends TERM to every task."""
    job_id = submitted(folder, "preempted")
    wait_for(lambda: len(losses(folder, "preempted")) >= 2, "the first steps")
    urgent = ["sbatch", "--parsable", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null"]
    taker = subprocess.run(
        [*urgent, "--wrap=true"], check=True, capture_output=True, text=True
    ).stdout.strip()
    wait_for(lambda: "=COMPLETED" in state(taker.strip()), "the urgent job")
    continued(job_id)
    log = meshwright(folder, "launch", "logs", "launch/preempted")
    assert "which is saved" in log and "resumed at step" in log
    assert losses(folder, "preempted") == pytest.approx(one_process, rel=1e-5)


@pytest.mark.soak  # SLURM takes a minute to notice; test_nodes.py loses nodes in `make test`
def test_a_lost_node_costs_nothing_that_was_saved(lab: Path, folder: Path, one_process: list[float]):
    """A power cut of the second node: the job is requeued and continues from its last checkpoint."""
    job_id = submitted(folder, "lost", "checkpoint.every_steps=2")
    wait_for(lambda: list(folder.glob("runs/lost/checkpoints/step-*/manifest.json")), "a checkpoint")
    subprocess.run([NODE_LAB, "kill", lab, "mwn2"], check=True)
    wait_for(lambda: "Restarts=1" in state(job_id), "the requeue")
    # SLURM counts wrongly where a job starts again before it has done with the lost node.
    time.sleep(6)
    subprocess.run([SLURM_LAB, "node", lab, "mwn2"], check=True, timeout=60)
    time.sleep(5)
    continued(job_id)
    assert "resumed at step" in meshwright(folder, "launch", "logs", "launch/lost")
    assert losses(folder, "lost") == pytest.approx(one_process, rel=1e-5)


@pytest.mark.soak  # no fault; other signals to a job are in `make test`
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
