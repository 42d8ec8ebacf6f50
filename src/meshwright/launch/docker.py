"""The docker lines of a job, one per node."""

import shlex

from meshwright.errors import LaunchError
from meshwright.launch.job import Job
from meshwright.launch.torchrun import torchrun_words


def docker_lines(job: Job, hosts: list[str]) -> list[str]:
    """`docker run` with the GPUs, the host's network and enough shared memory for NCCL."""
    container = job.site.container
    if container is None:
        raise LaunchError("no image is named", where="--image", hint="--image meshwright:0.1.0")
    mounts = (f"{job.working_dir}:{job.working_dir}", *container.mounts)
    words = [
        *("docker", "run", "--rm", "--init"),
        *(["--gpus", "all"] if job.is_on_gpus else []),
        *("--network", "host", "--ipc", "host", "--ulimit", "memlock=-1", "--ulimit", "stack=67108864"),
        *(word for mount in mounts for word in ("--volume", mount)),
        *("--workdir", job.working_dir),
        *(w for name, value in job.site.environment.items() for w in ("--env", f"{name}={value}")),
        container.image,
    ]
    return [shlex.join([*words, *_ranks(job, hosts[0], node)]) for node in range(job.num_nodes)]


def _ranks(job: Job, first_host: str, node: int) -> list[str]:
    if job.num_nodes == 1:
        return ["python", "-m", "meshwright", *job.train_words]
    return torchrun_words(job, rendezvous="static", first_host=first_host, node=str(node))
