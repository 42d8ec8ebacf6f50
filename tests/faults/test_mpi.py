"""Open MPI over two nodes on this machine: the printed mpirun line, unchanged."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.nodes import NODE_LAB, lacking, nodes_alone

from meshwright.observe.metrics import read_metrics

LACKING = lacking(("mpirun",))
pytestmark = pytest.mark.skipif(bool(LACKING), reason=f"OPEN MPI NOT TRIED: {LACKING}")
SITE = """
gpus_per_node = 1
cpus_per_gpu = 1
[environment]
GLOO_SOCKET_IFNAME = "eth0"
"""
RUN = ["demo", "schedule.num_steps=6", "schedule.warmup_steps=2", "observe.evaluate=null"]
RUN += ["data.synthetic={num_documents: 300}", "model.num_layers=1", "model.width=32"]
RUN += ["model.attention.num_heads=2", "data.sequence_length=32"]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two nodes, and a stand-in for ssh by which mpirun reaches them."""
    place = tmp_path_factory.mktemp("lab")
    agent = place / "remote_shell"
    agent.write_text(f'#!/bin/bash\nexec "{NODE_LAB}" run "{place}" "$@"\n')
    agent.chmod(0o755)
    with nodes_alone():
        up = subprocess.run([NODE_LAB, "up", place], capture_output=True, text=True, timeout=60)
        try:
            if up.returncode != 0:
                pytest.skip(f"OPEN MPI NOT TRIED: there can be no nodes here: {up.stderr[-500:]}")
            yield place
        finally:
            subprocess.run([NODE_LAB, "down", place], capture_output=True, timeout=60)


def environment(lab: Path) -> dict[str, str]:
    """What Open MPI needs to run as root and to reach the nodes without ssh."""
    return {
        **os.environ,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_plm_rsh_agent": str(lab / "remote_shell"),
        "OMPI_MCA_oob_tcp_if_include": "eth0",
    }


def meshwright(folder: Path, *words: str) -> str:
    command = [sys.executable, "-m", "meshwright", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def losses(run_dir: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(run_dir)]


def test_two_nodes_have_the_losses_of_one_process(lab: Path, tmp_path: Path):
    (tmp_path / "site.toml").write_text(SITE)
    words = ["parallel={dp_replicate: 2}", "name=two", "--via", "mpi", "--site", "site.toml"]
    found = json.loads(meshwright(tmp_path, "launch", *RUN, *words, "--hosts", "mwn1,mwn2", "--json"))
    line = f"cd {tmp_path} && {found['commands'][0]}"
    started = subprocess.run(
        [NODE_LAB, "run", lab, "mwn1", line],
        env=environment(lab),
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert started.returncode == 0, started.stderr
    assert "rank 0 runs on cores" in started.stderr and "2 ranks on cpu" in started.stderr
    meshwright(tmp_path, "train", *RUN, "parallel={}", "name=single")
    assert losses(tmp_path / "runs/two") == pytest.approx(losses(tmp_path / "runs/single"), rel=1e-5)
