"""Two supervisors, one per node: a lost rank, and the loss of the node that hosts the store.

Both nodes are on this machine and share its network; `node_lab.sh` separates networks in other tests.
"""

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.faults.test_launchers import free_port
from tests.support.faults import events
from tests.support.live_runs import LONGEST_SECONDS, SMALL, newest_step, ranks_of, start, wait_for

from meshwright.observe.metrics import read_metrics

RUN = (*SMALL, "schedule.num_steps=150", "checkpoint.every_steps=10", "resilience.step_timeout_seconds=20")


def _start_node(
    run_dir: Path, node: str, port: str, num_nodes: str = "2", words: tuple[str, ...] = RUN
) -> subprocess.Popen[str]:
    pod = {key: value for key, value in os.environ.items() if not key.startswith("PET_")}
    pod |= {"PET_NNODES": num_nodes, "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": node, "RANK": node}
    pod |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": num_nodes}
    return start(words, run_dir, env=pod | {"GLOO_SOCKET_IFNAME": "lo"})


def _wait_for_step(run_dir: Path, step: int, node: subprocess.Popen[str]) -> None:
    wait_for(lambda: list(run_dir.glob("checkpoints/step-*/manifest.json")), node)
    wait_for(lambda: newest_step(run_dir) >= step, node)


@contextmanager
def _two_nodes(run_dir: Path) -> Iterator[tuple[list[subprocess.Popen[str]], str]]:
    """Both nodes of a run that has saved a checkpoint, and its port; everything is killed at the end."""
    port = free_port()
    nodes = [_start_node(run_dir, node, port) for node in "01"]
    try:
        _wait_for_step(run_dir, 10, nodes[0])
        yield nodes, port
    finally:
        for one in nodes:
            one.kill()
            one.communicate()


def test_a_lost_rank_and_a_lost_store_host_are_survived(tmp_path, capfd):
    with _two_nodes(tmp_path) as (nodes, port):
        ranks_of(nodes[1])[0].kill()
        killed_at, step = time.time(), newest_step(tmp_path)
        wait_for(lambda: len(events(tmp_path, "resume")) == 1, nodes[0])
        rank_seconds = time.time() - killed_at
        _wait_for_step(tmp_path, step + 20, nodes[0])
        nodes[0].kill()  # the node that hosts the store: its rank ends with it
        nodes[0].communicate()
        killed_at = time.time()
        nodes[0] = _start_node(tmp_path, "0", port)  # as Kubernetes starts a pod again
        wait_for(lambda: len(events(tmp_path, "resume")) == 2, nodes[0])
        host_seconds = time.time() - killed_at
        printed = [one.communicate(timeout=LONGEST_SECONDS)[1] for one in nodes]
        assert [one.returncode for one in nodes] == [0, 0], printed
    with capfd.disabled():
        print(
            f"\nresumed after a lost rank in {rank_seconds:.1f} s, a lost store host in {host_seconds:.1f} s"
        )
    assert [row["step"] for row in read_metrics(tmp_path)] == list(range(1, 151))


ELASTIC = (
    *(*SMALL, "parallel.dp_replicate=3", "data.batch_sequences=12", "data.microbatch_sequences=1"),
    *("schedule.num_steps=100000", "checkpoint.every_steps=10", "resilience.step_timeout_seconds=60"),
    *("resilience.elastic.min_ranks=2", "resilience.elastic.node_grace_seconds=4"),
)


def test_the_run_goes_on_without_the_node_of_the_store_and_takes_it_back(tmp_path, capfd):
    """At the end rank 0 fails with an error that the run names itself, and all nodes end with it."""
    port = free_port()
    nodes = [_start_node(tmp_path, node, port, "3", ELASTIC) for node in "012"]
    try:
        _wait_for_step(tmp_path, 10, nodes[1])
        nodes[0].kill()  # with its rank 0, and nobody starts it again
        nodes[0].communicate()
        killed_at = time.monotonic()
        wait_for(lambda: len(events(tmp_path, "resume")) == 1, nodes[1])
        seconds = time.monotonic() - killed_at
        _wait_for_step(tmp_path, newest_step(tmp_path) + 20, nodes[1])
        nodes[0] = _start_node(tmp_path, "0", port, "3", ELASTIC)
        wait_for(lambda: len(events(tmp_path, "resume")) == 2, nodes[0])
        _wait_for_step(tmp_path, newest_step(tmp_path) + 20, nodes[0])
        (tmp_path / "metrics.jsonl").rename(tmp_path / "moved.jsonl")
        printed = [one.communicate(timeout=LONGEST_SECONDS)[1] for one in nodes]
        assert [one.returncode for one in nodes] == [4, 4, 4], printed
    finally:
        for one in nodes:
            one.kill()
            one.communicate()
    with capfd.disabled():
        print(f"\nwent on without the node of the store after {seconds:.1f} s, 4 s of grace included")
    for one in printed[1:]:
        assert "going on with nodes 1, 2: 2 ranks (dp_replicate=2)" in one
        assert "going on with nodes 0, 1, 2: 3 ranks (dp_replicate=3)" in one
    assert "the run directory was deleted or renamed" in printed[0]
    assert all("node 0 has ended with exit code 4" in one for one in printed[1:]), "no node waits for another"
    steps = [row["step"] for row in read_metrics(tmp_path / "moved.jsonl")]
    assert steps == list(range(1, len(steps) + 1)), "no step is missing or twice"
    assert (tmp_path / "supervisors" / "world-3.json").exists()
