"""Two supervisors, one per node: a lost rank, and the loss of the node that hosts the store.

Both nodes are on this machine and share its network; `node_lab.sh` separates networks in other tests.
"""

import os
import signal
import subprocess
import time
from pathlib import Path

from tests.faults.test_launchers import free_port
from tests.support.faults import events
from tests.support.live_runs import LONGEST_SECONDS, SMALL, newest_step, ranks_of, start, wait_for

from meshwright.observe.metrics import read_metrics

RUN = (*SMALL, "schedule.num_steps=150", "checkpoint.every_steps=10", "resilience.step_timeout_seconds=20")


def _start_node(run_dir: Path, node: str, port: str) -> subprocess.Popen[str]:
    pod = {key: value for key, value in os.environ.items() if not key.startswith("PET_")}
    pod |= {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": node, "RANK": node}
    pod |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    return start(RUN, run_dir, env=pod)


def _wait_for_step(run_dir: Path, step: int, node: subprocess.Popen[str]) -> None:
    wait_for(lambda: list(run_dir.glob("checkpoints/step-*/manifest.json")), node)
    wait_for(lambda: newest_step(run_dir) >= step, node)


def test_a_lost_rank_and_a_lost_store_host_are_survived(tmp_path):
    port = free_port()
    nodes = [_start_node(tmp_path, node, port) for node in "01"]
    try:
        _wait_for_step(tmp_path, 20, nodes[0])
        ranks_of(nodes[1])[0].kill()
        killed_at, step = time.time(), newest_step(tmp_path)
        wait_for(lambda: len(events(tmp_path, "resume")) == 1, nodes[0])
        print(f"a rank of node 1 is killed: resumed after {time.time() - killed_at:.1f} s")
        _wait_for_step(tmp_path, step + 20, nodes[0])
        nodes[0].kill()  # the node that hosts the store: its rank ends with it
        killed_at = time.time()
        nodes[0] = _start_node(tmp_path, "0", port)  # as Kubernetes starts a pod again
        wait_for(lambda: len(events(tmp_path, "resume")) == 2, nodes[0])
        print(f"node 0 is killed and started again: resumed after {time.time() - killed_at:.1f} s")
        printed = [one.communicate(timeout=LONGEST_SECONDS)[1] for one in nodes]
        assert [one.returncode for one in nodes] == [0, 0], printed
    finally:
        for one in nodes:
            one.kill()
    assert [row["step"] for row in read_metrics(tmp_path)] == list(range(1, 151))


def test_no_node_waits_for_one_that_has_given_up(tmp_path):
    """Rank 0 fails with an error that the run names itself, and node 1 ends with it."""
    port = free_port()
    nodes = [_start_node(tmp_path, node, port) for node in "01"]
    try:
        _wait_for_step(tmp_path, 10, nodes[0])
        (tmp_path / "metrics.jsonl").rename(
            tmp_path / "moved.jsonl"
        )  # a failure that a restart would meet again
        codes = [one.wait(timeout=60) for one in nodes]
    finally:
        for one in nodes:
            one.send_signal(signal.SIGKILL)
    assert codes == [4, 4]
