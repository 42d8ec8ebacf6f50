"""Lines that put a rank into a container."""

import shlex

from meshwright.launch.job import Job


def srun_container(job: Job) -> list[str]:
    """Options of srun for pyxis."""
    container = job.site.container
    if container is None or container.kind != "pyxis":
        return []
    mounts = ",".join((f"{job.working_dir}:{job.working_dir}", *container.mounts))
    return [
        f"--container-image={shlex.quote(container.image)}",
        f"--container-mounts={shlex.quote(mounts)}",
        f"--container-workdir={shlex.quote(job.working_dir)}",
    ]


def inside_container(job: Job, command: str) -> str:
    """The command, inside apptainer or enroot where the site has one of them."""
    container = job.site.container
    if container is None or container.kind not in ("apptainer", "enroot"):
        return command
    mounts = (f"{job.working_dir}:{job.working_dir}", *container.mounts)
    if container.kind == "apptainer":
        binds = [word for mount in mounts for word in ("--bind", mount)]
        words = ["apptainer", "exec", *(["--nv"] if job.is_on_gpus else []), *binds, "--pwd", job.working_dir]
    else:
        words = ["enroot", "start", "--rw", *(word for mount in mounts for word in ("--mount", mount))]
    return f"{shlex.join([*words, container.image])} {command}"
