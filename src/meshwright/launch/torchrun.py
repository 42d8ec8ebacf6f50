"""The torchrun lines of a job, one per node."""

import shlex
from typing import Literal

from meshwright.launch.container import inside_container
from meshwright.launch.job import Job

Rendezvous = Literal["static", "c10d"]


def torchrun_words(job: Job, *, rendezvous: Rendezvous, first_host: str, node: str) -> list[str]:
    """torchrun and the program; `node` is the node's number, or a variable that holds it."""
    meeting = (
        ["--node-rank", node, "--master-addr", first_host, "--master-port", str(job.port)]
        if rendezvous == "static"
        else ["--rdzv-backend=c10d", f"--rdzv-id={job.name}", f"--rdzv-endpoint={first_host}:{job.port}"]
    )
    return [
        *("torchrun", f"--nnodes={job.num_nodes}", f"--nproc-per-node={job.ranks_per_node}"),
        *meeting,
        *("-m", "meshwright", *job.train_words),
    ]


def torchrun_variables() -> dict[str, str]:
    """Signals that torchrun passes on, as a variable: older releases refuse an option that they do not know.

    Without it torchrun ends at once on USR1, and its workers live on as orphans.
    """
    return {"PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"}


def torchrun_lines(job: Job, hosts: list[str], *, rendezvous: Rendezvous = "static") -> list[str]:
    """One line per node, in the order of their ranks."""
    variables = ["env", *(f"{name}={value}" for name, value in torchrun_variables().items())]
    each = [
        torchrun_words(job, rendezvous=rendezvous, first_host=hosts[0], node=str(node))
        for node in range(job.num_nodes)
    ]
    return [inside_container(job, shlex.join([*variables, *words])) for words in each]


def ssh_script(job: Job, hosts: list[str], lines: list[str]) -> str:
    """A script that starts every node over ssh and ends all of them when one fails."""
    exports = [f"export {name}={shlex.quote(value)}" for name, value in job.site.environment.items()]
    setup = [*(f"module load {name}" for name in job.site.modules), *job.site.setup, *exports]
    commands = ["; ".join([f"cd {shlex.quote(job.working_dir)}", *setup, f"exec {line}"]) for line in lines]
    logs = [shlex.quote(f"{job.folder}/{host}.log") for host in hosts]
    started = [
        f"ssh -tt {host} {shlex.quote(command)} > {log} 2>&1 < /dev/null &"
        for host, command, log in zip(hosts, commands, logs, strict=True)
    ]
    return "\n".join(
        [
            "#!/bin/bash",
            "# Starts the run on every node; the first node that fails ends the others.",
            "trap 'kill $(jobs -p) 2>/dev/null' EXIT",
            *started,
            f"for _ in $(seq {job.num_nodes}); do",
            "    wait -n || exit $?",
            "done",
            "",
        ]
    )
