"""Two supervisors, one per node: a lost rank, and the loss of the node that hosts the store.

Both nodes are on this machine and share its network; `node_lab.sh` separates networks in other tests.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.faults.test_launchers import free_port
from tests.support.fault_table import Trial
from tests.support.faults import RUN, assert_undisturbed, events, finish, is_training, require_newest_opens
from tests.support.live_runs import (
    LONGEST_SECONDS,
    SMALL,
    Launcher,
    kill_with_ranks,
    newest_step,
    ranks_of,
    start,
    wait_for,
    wait_for_checkpoint,
)

from meshwright.observe.metrics import last_step, read_metrics


def _start_node(
    run_dir: Path, node: int, port: str, num_nodes: int = 2, words: Sequence[str] = RUN
) -> Launcher:
    pod = {key: value for key, value in os.environ.items() if not key.startswith("PET_")}
    pod |= {"PET_NNODES": f"{num_nodes}", "PET_NODE_RANK": f"{node}", "RANK": f"{node}"}
    pod |= {"PET_NPROC_PER_NODE": "1", "WORLD_SIZE": f"{num_nodes}", "GLOO_SOCKET_IFNAME": "lo"}
    return start(words, run_dir, env=pod | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})


@contextmanager
def _started(start_node: Callable[[int], Launcher], num_nodes: int) -> Iterator[list[Launcher]]:
    """The nodes of a run; all of them are killed at the end."""
    nodes = [start_node(node) for node in range(num_nodes)]
    try:
        yield nodes
    finally:
        for node in nodes:
            kill_with_ranks(node)


def _resumed(run_dir: Path, node: Launcher, *, times: int) -> float:
    """Wait until the run trains after it was resumed so often; returns the time."""
    wait_for(lambda: len(events(run_dir, "resume")) >= times and is_training(run_dir), node)
    require_newest_opens(run_dir)
    return time.monotonic()


def test_a_lost_rank_and_a_lost_store_host_are_survived(tmp_path, undisturbed, record):
    port = free_port()
    with _started(lambda node: _start_node(tmp_path, node, port), 2) as nodes:
        wait_for_checkpoint(tmp_path, nodes[0])
        killed_at = time.monotonic()
        ranks_of(nodes[1])[0].kill()
        seconds = _resumed(tmp_path, nodes[0], times=1) - killed_at
        lost = events(tmp_path, "restart")[-1]["lost_steps"]
        record(Trial("two nodes: kill -9 of a rank of one node", lost, resume_seconds=seconds))
        wait_for_checkpoint(tmp_path, nodes[0], step=newest_step(tmp_path) + 10)
        killed_at = time.monotonic()
        kill_with_ranks(nodes[0])  # the node that hosts the store
        reached = last_step(tmp_path)
        nodes[0] = _start_node(tmp_path, 0, port)  # as Kubernetes starts a pod again
        seconds = _resumed(tmp_path, nodes[0], times=2) - killed_at
        lost = reached - events(tmp_path, "resume")[-1]["step"]
        record(Trial("two nodes: node of the store lost and started again", lost, resume_seconds=seconds))
        for node in nodes:
            finish(node)
    assert_undisturbed(tmp_path, undisturbed)


ELASTIC = (
    *(*SMALL, "parallel.dp_replicate=3", "data.batch_sequences=12", "data.microbatch_sequences=1"),
    *("schedule.num_steps=100000", "checkpoint.every_steps=5", "resilience.step_timeout_seconds=60"),
    *("resilience.elastic.min_ranks=2", "resilience.elastic.node_grace_seconds=4"),
)


def test_the_run_goes_on_without_the_node_of_the_store_and_takes_it_back(tmp_path, record):
    """At the end rank 0 fails with an error that the run names itself, and all nodes end with it."""
    port = free_port()
    with _started(lambda node: _start_node(tmp_path, node, port, 3, ELASTIC), 3) as nodes:
        wait_for_checkpoint(tmp_path, nodes[1])
        killed_at = time.monotonic()
        kill_with_ranks(nodes[0])  # nobody starts it again
        reached = last_step(tmp_path)
        seconds = _resumed(tmp_path, nodes[1], times=1) - killed_at
        lost = reached - events(tmp_path, "resume")[-1]["step"]
        fault = "three nodes, elastic: node of the store lost and left out, grace 4 s"
        record(Trial(fault, lost, resume_seconds=seconds))
        wait_for_checkpoint(tmp_path, nodes[1], step=newest_step(tmp_path) + 5)
        started_at = time.monotonic()
        nodes[0] = _start_node(tmp_path, 0, port, 3, ELASTIC)
        seconds = _resumed(tmp_path, nodes[0], times=2) - started_at
        fault = "three nodes, elastic: the lost node comes back"
        record(Trial(fault, resume_seconds=seconds))  # the others saved before
        wait_for_checkpoint(tmp_path, nodes[0], step=newest_step(tmp_path) + 5)
        (tmp_path / "metrics.jsonl").rename(tmp_path / "moved.jsonl")
        printed = [node.communicate(timeout=LONGEST_SECONDS)[1] for node in nodes]
        assert [node.returncode for node in nodes] == [4, 4, 4], printed
    for one in printed[1:]:
        assert "going on with nodes 1, 2: 2 ranks (dp_replicate=2)" in one
        assert "going on with nodes 0, 1, 2: 3 ranks (dp_replicate=3)" in one
    assert "the run directory was deleted or renamed" in printed[0]
    assert all("node 0 has ended with exit code 4" in one for one in printed[1:]), "no node waits for another"
    steps = [row["step"] for row in read_metrics(tmp_path / "moved.jsonl")]
    assert steps == list(range(1, len(steps) + 1)), "no step is missing or twice"
    assert (tmp_path / "supervisors" / "world-3.json").exists()
