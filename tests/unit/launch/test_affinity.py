"""Cores and threads of ranks on hosts with one and several NUMA nodes."""

import os
import subprocess
import sys

import pytest

from meshwright.hardware.cores import allowed_cores, parse_cores, show_cores
from meshwright.launch.affinity import Host, choose_cores
from meshwright.launch.launched import OPEN_MPI, SLURM, TORCHRUN, LaunchedRank, Launcher
from meshwright.spec import LaunchSpec

TWO_NODES = {0: parse_cores("0-15"), 1: parse_cores("16-31")}
ALL = parse_cores("0-31")


def choice(
    local_rank: int = 0,
    num_here: int | None = 4,
    *,
    launcher: Launcher = TORCHRUN,
    host: Host | None = None,
    spec: LaunchSpec | None = None,
    **environment: str,
):
    rank = LaunchedRank(launcher, local_rank, 8, local_rank, num_here)
    return choose_cores(spec or LaunchSpec(), rank, host or Host(ALL, ALL, TWO_NODES), environment)


def test_a_rank_is_bound_to_the_numa_node_of_its_gpu():
    found = choice(1, host=Host(ALL, ALL, TWO_NODES, gpu_node=1))
    assert found.cores == TWO_NODES[1] and found.reason == "NUMA node 1 of its GPU"
    assert found.threads == 8  # 32 cores, 4 ranks


def test_cpu_ranks_are_spread_over_numa_nodes():
    assert [show_cores(choice(rank).cores) for rank in range(4)] == ["0-15", "0-15", "16-31", "16-31"]
    assert [show_cores(choice(rank, 2).cores) for rank in range(2)] == ["0-15", "16-31"]
    assert show_cores(choice(0, 1).cores) == "0-15"
    assert show_cores(choice(2, 3).cores) == "16-31"


@pytest.mark.parametrize(("launcher", "name"), [(SLURM, "srun"), (OPEN_MPI, "mpirun")])
def test_the_binding_of_a_launcher_stays(launcher, name):
    bound = Host(ALL, parse_cores("8-15"), TWO_NODES, gpu_node=1)
    found = choice(launcher=launcher, host=bound)
    assert found.cores is None and found.reason == f"bound by {name}"
    assert found.threads == 8
    shared = Host(ALL, parse_cores("0-15"), TWO_NODES)  # --bind-to numa: ranks share the cores of one node
    assert choice(num_here=8, host=shared).threads == 4


def test_a_gpu_far_from_every_allowed_core_binds_nothing():
    found = choice(host=Host(TWO_NODES[0], TWO_NODES[0], TWO_NODES, gpu_node=1))
    assert found.cores is None and "no core that this process may use" in found.reason


def test_one_numa_node_needs_no_binding():
    found = choice(host=Host(parse_cores("0-1"), parse_cores("0-1"), {0: parse_cores("0-1")}))
    assert found.cores is None and found.threads == 1  # 2 cores, 4 ranks


def test_binding_and_threads_are_settings():
    assert choice(spec=LaunchSpec(bind="none")).cores is None
    assert choice(spec=LaunchSpec(threads=3), OMP_NUM_THREADS="8").threads == 3
    kept = choice(OMP_NUM_THREADS="8")
    assert kept.threads is None and kept.threads_reason == "OMP_NUM_THREADS=8 as set"
    high = choice(OMP_NUM_THREADS="64")
    assert high.threads_reason == "OMP_NUM_THREADS=64 as set, more than its 16 cores"


def test_the_line_that_rank_0_prints():
    host = Host(ALL, ALL, TWO_NODES, gpu_node=0)
    assert choice(host=host).text(host) == (
        "rank 0 runs on cores 0-15 (NUMA node 0 of its GPU), "
        "OMP_NUM_THREADS=8 (32 cores, 4 ranks on this host)"
    )


PROGRAM = """
import os, threading
started, end = threading.Event(), threading.Event()
seen = []
def other():
    started.set(); end.wait(); seen.append(os.sched_getaffinity(0))
thread = threading.Thread(target=other); thread.start(); started.wait()
from meshwright.launch.affinity import bind
bind(frozenset({CORE}))
end.set(); thread.join()
assert os.sched_getaffinity(0) == {CORE} == seen[0], seen
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no CPU affinity on this system")
def test_threads_that_exist_already_are_bound_too():
    program = PROGRAM.replace("CORE", str(max(allowed_cores())))
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
