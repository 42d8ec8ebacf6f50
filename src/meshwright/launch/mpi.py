"""The mpirun line of a job (Open MPI)."""

import shlex

from meshwright.launch.container import inside_container
from meshwright.launch.job import Job

_PASSED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH")


def mpirun_line(job: Job, hosts: list[str], hostfile: str) -> str:
    """`mpirun` with a hostfile; ranks of a node are consecutive, each bound to a NUMA node of its cores.

    Each rank sets OMP_NUM_THREADS itself: only there the cores of the host are known.
    """
    variables = [
        f"MASTER_ADDR={hosts[0]}",
        f"MASTER_PORT={job.port}",
        *(f"{name}={value}" for name, value in job.site.environment.items()),
        *_PASSED,
    ]
    words = [
        *("mpirun", "-np", str(job.num_ranks), "--hostfile", hostfile),
        *("--map-by", "numa", "--bind-to", "numa"),
        *(word for variable in variables for word in ("-x", variable)),
    ]
    return f"{shlex.join(words)} {inside_container(job, job.command)}"
