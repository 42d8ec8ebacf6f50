"""The sbatch file of a job: one task per GPU, saved and requeued before the time limit."""

import shlex
import signal
from collections.abc import Iterator

from meshwright.launch.container import inside_container, srun_container
from meshwright.launch.job import Job, clock

REQUEUED_CODE = 130
"""Exit code of a run that was asked to stop and has saved."""
_STARTING_CODE = 128 + signal.SIGUSR1
"""Exit code of srun where USR1 ended ranks that had not reached their first step."""
_LAST_RANK_SECONDS = 60
"""Ranks that are still there so long after the first one has ended are killed."""
_ANSWER_SECONDS = 120
"""A node that does not start a command within this time is lost."""
_REQUEUE = """\
# A run that is asked to stop (USR1 before the time limit, TERM on preemption) saves and exits {code}.
# The job then goes back into the queue and continues where it was, unless it was cancelled: scancel
# signals this shell too. The same holds for a run that was not yet at its first step when USR1 came
# (USR1 ends its ranks: {starting}), and for one that failed because a node no longer answers.
nodes_answer() {{ timeout {seconds} srun --overlap --ntasks="$SLURM_NNODES" --ntasks-per-node=1 true; }}
asked_to_stop() {{ [ "$code" -eq {code} ] || [ "$code" -eq {starting} ]; }}
if [ -z "$cancelled" ] && {{ asked_to_stop || {{ [ "$code" -ne 0 ] && ! nodes_answer; }}; }}; then
    scontrol requeue "$SLURM_JOB_ID"
fi"""


def sbatch_text(job: Job) -> str:
    """The sbatch file."""
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in _options(job)),
        "",
        *_setup(job),
        "# Rank 0 is on the first node; srun numbers tasks in the order of the nodes.",
        'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))",
        "export MASTER_ADDR MASTER_PORT",
        "",
        "cancelled=",
        "trap 'cancelled=1' TERM",
        srun_line(job),
        "code=$?",
        _REQUEUE.format(code=REQUEUED_CODE, starting=_STARTING_CODE, seconds=_ANSWER_SECONDS),
        'exit "$code"',
    ]
    return "\n".join(lines) + "\n"


def _options(job: Job) -> Iterator[str]:
    site = job.site
    yield f"--job-name={job.name}"
    yield f"--nodes={job.num_nodes}"
    yield f"--ntasks-per-node={job.ranks_per_node}"
    if job.is_on_gpus and site.gpu_request == "gres":
        yield f"--gres=gpu:{job.ranks_per_node}"
    elif job.is_on_gpus and site.gpu_request == "gpus-per-node":
        yield f"--gpus-per-node={job.ranks_per_node}"
    yield f"--cpus-per-task={site.cpus_per_gpu}"
    named = {"mem": site.memory, "partition": site.partition, "account": site.account, "qos": site.qos}
    for name, value in {**named, "constraint": site.constraint}.items():
        if value is not None:
            yield f"--{name}={value}"
    yield f"--time={clock(job.limit_minutes)}"
    yield f"--signal=USR1@{site.signal_seconds}"
    yield "--requeue"
    if site.is_exclusive:
        yield "--exclusive"
    yield f"--chdir={shlex.quote(job.working_dir)}"
    yield f"--output={shlex.quote(f'{job.folder}/%j.log')}"
    yield "--open-mode=append"
    yield from site.sbatch_options


def _setup(job: Job) -> list[str]:
    """Modules, lines of the site and variables of every rank."""
    lines = [f"module load {name}" for name in job.site.modules]
    lines += job.site.setup
    lines += [f"export {name}={shlex.quote(value)}" for name, value in job.site.environment.items()]
    lines += ["export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK"]
    return [*lines, ""]


def srun_line(job: Job) -> str:
    """The line that starts the ranks; each sees all GPUs of its node, as NCCL's peer links need."""
    options = [
        *(["--gpu-bind=none"] if job.is_on_gpus else []),
        '--cpus-per-task="$SLURM_CPUS_PER_TASK"',
        "--cpu-bind=cores",
        # Ranks that were asked to stop end one after the other: the first must not take the others with it.
        "--kill-on-bad-exit=0",
        f"--wait={_LAST_RANK_SECONDS}",
        *srun_container(job),
        *job.site.srun_options,
    ]
    return f"srun {' '.join(options)} {inside_container(job, job.command)}"
