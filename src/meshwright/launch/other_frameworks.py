"""The command lines that start a job with the launchers of Accelerate and DeepSpeed."""

import shlex

from meshwright.launch.job import Job


def accelerate_lines(job: Job, hosts: list[str], config_file: str) -> list[str]:
    """One line per node, in the order of their ranks."""
    meeting = ["--main_process_ip", hosts[0], "--main_process_port", str(job.port)]
    return [
        shlex.join(
            [
                *("accelerate", "launch", "--config_file", config_file, "--machine_rank", str(node)),
                *(meeting if job.num_nodes > 1 else []),
                *("-m", "meshwright", *job.train_words),
            ]
        )
        for node in range(job.num_nodes)
    ]


def deepspeed_line(job: Job, hosts: list[str], hostfile: str) -> str:
    """The line for the first node, from which DeepSpeed reaches the others over ssh."""
    several = [*("--hostfile", hostfile), "--master_addr", hosts[0]] if job.num_nodes > 1 else []
    return shlex.join(
        [
            *("deepspeed", *several, "--num_gpus", str(job.ranks_per_node), "--master_port", str(job.port)),
            *("--no_local_rank", "--module", "meshwright", *job.train_words),
        ]
    )
