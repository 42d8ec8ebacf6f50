"""The network between two nodes of a run is cut and restored (network namespaces on this machine)."""

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.fault_table import Trial
from tests.support.faults import RUN, assert_undisturbed, events, finish, is_training, require_newest_opens
from tests.support.live_runs import Launcher, kill_with_ranks, wait_for, wait_for_checkpoint
from tests.support.nodes import NODE_LAB, lacking, nodes_alone

LACKING = lacking(())
pytestmark = pytest.mark.skipif(bool(LACKING), reason=f"CUT NETWORK NOT TRIED: {LACKING}")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two nodes with a network between them and one file system."""
    place = tmp_path_factory.mktemp("lab")
    with nodes_alone():
        up = subprocess.run([NODE_LAB, "up", place], capture_output=True, text=True, timeout=60)
        try:
            if up.returncode != 0:
                pytest.skip(f"CUT NETWORK NOT TRIED: there can be no nodes here: {up.stderr[-500:]}")
            yield place
        finally:
            subprocess.run([NODE_LAB, "down", place], capture_output=True, timeout=60)


def _start_node(lab: Path, run_dir: Path, node: int) -> Launcher:
    """`meshwright train` on one of the nodes, as Kubernetes starts it in a pod."""
    variables = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(node), "RANK": str(node)}
    variables |= {"MASTER_ADDR": "10.99.7.1", "MASTER_PORT": "29511", "WORLD_SIZE": "2"}
    line = shlex.join(["exec", sys.executable, "-m", "meshwright", *RUN, "--dir", str(run_dir)])
    environment = {**os.environ, **variables, "GLOO_SOCKET_IFNAME": "eth0"}
    return Launcher([str(NODE_LAB), "run", str(lab), f"mwn{node + 1}", line], env=environment)


def _set_link(state: str) -> None:
    subprocess.run(["ip", "link", "set", "mwve2", state], check=True)


def test_a_cut_network_is_noticed_and_the_run_goes_on_when_it_is_back(
    tmp_path: Path, lab: Path, undisturbed: Path, record
) -> None:
    """Ranks hang in a collective without an error. They are ended, and the next ones wait until they meet."""
    nodes = [_start_node(lab, tmp_path, node) for node in range(2)]
    try:
        wait_for_checkpoint(tmp_path, nodes[0])
        _set_link("down")
        cut_at = time.monotonic()
        wait_for(lambda: events(tmp_path, "restart"), nodes[0])
        detect_seconds = time.monotonic() - cut_at
        require_newest_opens(tmp_path)
        _set_link("up")
        restored_at = time.monotonic()
        wait_for(lambda: is_training(tmp_path), nodes[0])
        resume_seconds = time.monotonic() - restored_at
        for node in nodes:
            finish(node)
    finally:
        for node in nodes:
            kill_with_ranks(node)
    assert_undisturbed(tmp_path, undisturbed)
    lost_steps = events(tmp_path, "restart")[0]["lost_steps"]
    fault = "network between two nodes cut and restored, timeout 5 s"
    record(Trial(fault, lost_steps, detect_seconds, resume_seconds))
