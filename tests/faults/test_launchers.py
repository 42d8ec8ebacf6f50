"""Ranks that another launcher started: torchrun, and processes with the variables of srun."""

import os
import socket
import subprocess
import sys

import psutil
import pytest
from tests.support.live_runs import LONGEST_SECONDS, SMALL, ranks_of, start, training

from meshwright.observe.metrics import read_metrics

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
# One program that joins four times, and reads weights on the first rank alone.
SCRIPT = """
import sys
import torch
from torch.nn.functional import mse_loss
import meshwright

def loss(model, batch):
    return mse_loss(model(batch), batch, reduction="sum"), torch.tensor(float(batch.numel()))

data = [torch.randn(4) for _ in range(16)]
for name in ("first", "second"):
    meshwright.fit(
        torch.nn.Linear(4, 4), data, loss, directory=f"{sys.argv[1]}/{name}", num_steps=2, batch_samples=4,
        device="cpu", name=name,
    )
for name in ("third", "fourth"):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    run = meshwright.prepare(model, optimizer, loader, directory=f"{sys.argv[1]}/{name}", device="cpu")
    for batch in run.loader:
        run.backward(*loss(model, batch))
        run.step()
    if run.is_first:
        meshwright.load_weights(torch.nn.Linear(4, 4), f"{sys.argv[1]}/first")
        print("loaded on the first rank")
    run.end()
"""


def test_no_rank_outlives_torchrun(tmp_path):
    with training(tmp_path, launcher=TORCHRUN) as torchrun:
        ranks = ranks_of(torchrun)
        assert len(ranks) == 2
        torchrun.kill()
        assert not psutil.wait_procs(ranks, timeout=LONGEST_SECONDS)[1]


def test_a_program_joins_several_times_and_one_rank_loads_weights_alone(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ended = subprocess.run(
        [sys.executable, *TORCHRUN, str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=LONGEST_SECONDS,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("loaded on the first rank") == 2
    assert [len(read_metrics(tmp_path / name)) for name in ("first", "second")] == [2, 2]
    assert all(list(tmp_path.glob(f"{name}/checkpoints/step-*")) for name in ("third", "fourth"))


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


@pytest.mark.parametrize("rendezvous", [pytest.param("static", marks=pytest.mark.soak), "c10d"])
def test_two_agents_of_torchrun_form_one_world(tmp_path, rendezvous):
    port = free_port()
    meeting = {
        "static": ("--master-addr=127.0.0.1", f"--master-port={port}"),
        "c10d": ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=test"),
    }[rendezvous]
    agent = ("-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--local-addr=127.0.0.1")
    words = (*SMALL, "schedule.num_steps=3", "schedule.warmup_steps=0")
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    agents = [
        start(words, tmp_path, launcher=(*agent, f"--node-rank={node}", *meeting), env=environment)
        for node in range(2)
    ]
    printed = [one.communicate(timeout=LONGEST_SECONDS)[1] for one in agents]
    assert [one.returncode for one in agents] == [0, 0], printed
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3]


def test_pods_start_the_ranks_of_their_nodes(tmp_path):
    """A PyTorchJob of two pods that run `meshwright train` without torchrun."""
    pod = {
        **{key: value for key, value in os.environ.items() if not key.startswith("PET_")},
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
        "WORLD_SIZE": "2",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    words = (*SMALL, "schedule.num_steps=3", "schedule.warmup_steps=0")
    pods = [start(words, tmp_path, env={**pod, "PET_NODE_RANK": node, "RANK": node}) for node in "01"]
    printed = [one.communicate(timeout=LONGEST_SECONDS)[1] for one in pods]
    assert [one.returncode for one in pods] == [0, 0], printed
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3]
    pod |= {"PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": "2"}
    too_few = start(words, tmp_path, env=pod)
    _, refused = too_few.communicate(timeout=LONGEST_SECONDS)
    fact = "parallel asks for 2 ranks, and Kubernetes has started 2 nodes of 2 ranks"
    assert too_few.returncode == 2 and fact in refused


def test_tasks_of_srun_form_one_world(tmp_path):
    task = {
        **{key: value for key, value in os.environ.items() if not key.startswith("SLURM")},
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_NODEID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "2",
    }
    words = (*SMALL, "schedule.num_steps=3", "schedule.warmup_steps=0")
    tasks = [
        start(words, tmp_path, env={**task, "SLURM_PROCID": rank, "SLURM_LOCALID": rank}) for rank in "01"
    ]
    printed = [one.communicate(timeout=LONGEST_SECONDS)[1] for one in tasks]
    assert [one.returncode for one in tasks] == [0, 0], printed
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3]
    assert (tmp_path / "events-1.jsonl").exists() and not (tmp_path / ".lock").exists()
    contradictory = start(words, tmp_path, env={**task, "SLURM_PROCID": "2", "SLURM_LOCALID": "0"})
    _, refused = contradictory.communicate(timeout=LONGEST_SECONDS)
    assert contradictory.returncode == 2 and "SLURM_PROCID=2 SLURM_NTASKS=2" in refused
