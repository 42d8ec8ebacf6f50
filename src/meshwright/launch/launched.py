"""Which rank this process is: the variables of every launcher, read into one value. Imports no torch.

A launcher is one row of LAUNCHERS. `launched_rank` finds the one that started this process and refuses
variables that are incomplete or contradict each other. A world of one task is no launch: a shell of `salloc`
or `srun --pty`, `mpirun -np 1`, and a container whose hook sets RANK=0 WORLD_SIZE=1 leave it to `meshwright
train` to start the ranks. So does a platform that starts one process per node (`launched_node`).
"""

import os
from dataclasses import dataclass

from meshwright.errors import LaunchError
from meshwright.launch.launched_node import Environment, launched_node, number

STARTED_HERE = "MESHWRIGHT_LOCAL_RANKS"
"""Set by `run_attempt` for the ranks of one machine."""
RANK_FOLDER = "MESHWRIGHT_RANK_FOLDER"
"""Names the folder of the process that started this rank; set by `run_attempt`, for ranks of a node too."""
# Steps of SLURM that are no tasks of srun: the batch script, the shell of salloc, and the container of a job.
_FIRST_RESERVED_STEP = 0xFFFFFFF0


@dataclass(frozen=True)
class Launcher:
    """A program that starts ranks, and the variables in which it numbers them."""

    name: str
    rank: str
    num_ranks: str
    local_rank: str
    num_local_ranks: str

    @property
    def variables(self) -> tuple[str, str, str]:
        """The variables without which a rank cannot join."""
        return self.rank, self.num_ranks, self.local_rank


TORCHRUN = Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
OPEN_MPI = Launcher(
    "mpirun",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
SLURM = Launcher("srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
# MPICH and Intel MPI (Hydra), and Cray's PALS: the process manager's interface PMI.
HYDRA = Launcher("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
CRAY = Launcher("mpiexec", "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")
LAUNCHERS = (TORCHRUN, OPEN_MPI, SLURM, HYDRA, CRAY)


@dataclass(frozen=True)
class LaunchedRank:
    """This process among the ranks that a launcher has started."""

    launcher: Launcher
    rank: int
    num_ranks: int
    local_rank: int
    num_local_ranks: int | None
    """Ranks on this host; None where the launcher does not tell."""

    @property
    def is_one_host(self) -> bool:
        """Whether all ranks are known to be on this host."""
        return self.num_local_ranks == self.num_ranks


def launched_rank(environment: Environment = os.environ) -> LaunchedRank | None:
    """The rank that a launcher made of this process, or None; LaunchError where variables contradict."""
    if launched_node(environment) is not None:
        return None
    outer = _outer_rank(environment)
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return outer
    found = _read(TORCHRUN, environment)
    is_certain = STARTED_HERE in environment or "TORCHELASTIC_RUN_ID" in environment
    if outer is None and not is_certain and found.num_ranks == 1:
        return None
    if outer is not None and not is_certain and not _can_contain(outer, found):
        raise _contradiction(outer, found)
    return found


def is_local_rank(environment: Environment = os.environ) -> bool:
    """Whether `meshwright` started this process as a rank of one machine."""
    return "RANK" in environment and STARTED_HERE in environment


def is_supervised(environment: Environment = os.environ) -> bool:
    """Whether `meshwright` started this process as a rank, of a machine or of a node."""
    return "RANK" in environment and RANK_FOLDER in environment


def _outer_rank(environment: Environment) -> LaunchedRank | None:
    """The task of mpirun or srun that this process is in; mpirun is inside of srun where both are set."""
    if _several(OPEN_MPI, environment):
        return _read(OPEN_MPI, environment)
    if _is_slurm_task(environment) and _several(SLURM, environment):
        _require_one_count(environment)
        return _read(SLURM, environment)
    if "SLURM_STEP_ID" not in environment and _several(HYDRA, environment):
        return _read(CRAY if CRAY.local_rank in environment else HYDRA, environment)
    if "PMIX_RANK" in environment and not any(one.num_ranks in environment for one in LAUNCHERS):
        raise LaunchError(
            f"PMIX_RANK={environment['PMIX_RANK']}, and no variable says how many ranks there are",
            where="environment",
            hint="export RANK, WORLD_SIZE and LOCAL_RANK, or start the ranks with mpirun, srun or torchrun",
        )
    return None


def _require_one_count(environment: Environment) -> None:
    """Refuse a number of tasks that is not that of the step, such as one that a script has exported."""
    tasks = environment.get("SLURM_STEP_NUM_TASKS", environment["SLURM_NTASKS"])
    if tasks != environment["SLURM_NTASKS"]:
        raise LaunchError(
            f"SLURM_NTASKS={environment['SLURM_NTASKS']} contradicts SLURM_STEP_NUM_TASKS={tasks}",
            where="environment",
            hint="leave SLURM_NTASKS as srun sets it",
        )


def _several(launcher: Launcher, environment: Environment) -> bool:
    return launcher.num_ranks in environment and number(launcher.num_ranks, environment) > 1


def _is_slurm_task(environment: Environment) -> bool:
    """Whether srun started this process as one of several tasks: not the batch script, nor a shell."""
    step, tasks = environment.get("SLURM_STEP_ID", ""), environment.get("SLURM_STEP_NUM_TASKS", "")
    return step.isdecimal() and int(step) < _FIRST_RESERVED_STEP and tasks != "1"


def _read(launcher: Launcher, environment: Environment) -> LaunchedRank:
    """The rank that one launcher's variables describe."""
    # Scripts that start one rank per host leave LOCAL_RANK out.
    optional = "LOCAL_RANK" if launcher is TORCHRUN else ""
    missing = [name for name in launcher.variables if name not in environment and name != optional]
    if missing:
        there = _shown([name for name in launcher.variables if name in environment], environment)
        raise LaunchError(
            f"{there} without {', '.join(missing)}: this process does not know its rank",
            where="environment",
            hint=f"start the ranks with {launcher.name}, set all of these variables, or unset them",
        )
    rank, num_ranks = number(launcher.rank, environment), number(launcher.num_ranks, environment)
    local_rank = number(launcher.local_rank, environment) if launcher.local_rank in environment else 0
    if rank >= num_ranks:
        raise LaunchError(
            f"{_shown(launcher.variables[:2], environment)}: the rank is outside of the world",
            where="environment",
            hint="ranks count from 0",
        )
    here = _num_local_ranks(launcher, environment)
    if here is not None and not local_rank < here <= num_ranks:
        raise LaunchError(
            f"{_shown([*launcher.variables, launcher.num_local_ranks], environment)} contradict each other",
            where="environment",
            hint="the local rank is below the ranks of this host, and those are at most all ranks",
        )
    return LaunchedRank(launcher, rank, num_ranks, local_rank, here)


def _num_local_ranks(launcher: Launcher, environment: Environment) -> int | None:
    name = launcher.num_local_ranks
    if name not in environment:
        return None
    if launcher is SLURM:
        return _tasks_of_node(environment[name], environment.get("SLURM_NODEID", ""))
    return number(name, environment)


def _tasks_of_node(text: str, node: str) -> int | None:
    """Tasks on this node, of SLURM's list such as `2(x3),1`; None where it cannot be read."""
    counts: list[int] = []
    for part in text.split(","):
        count, _, times = part.rstrip(")").partition("(x")
        if not count.isdecimal() or (times and not times.isdecimal()):
            return None
        counts += [int(count)] * min(int(times or 1), 1_000_000)
    return counts[int(node)] if node.isdecimal() and int(node) < len(counts) else None


def _can_contain(outer: LaunchedRank, inner: LaunchedRank) -> bool:
    """Whether these are the same ranks, or each outer task has started the same number of inner ranks."""
    each, rest = divmod(inner.num_ranks, outer.num_ranks)
    return rest == 0 and inner.rank // each == outer.rank


def _contradiction(outer: LaunchedRank, inner: LaunchedRank) -> LaunchError:
    inner_text = f"{inner.launcher.rank}={inner.rank} {inner.launcher.num_ranks}={inner.num_ranks}"
    outer_text = f"{outer.launcher.rank}={outer.rank} {outer.launcher.num_ranks}={outer.num_ranks}"
    return LaunchError(
        f"{inner_text} contradict {outer_text}",
        where="environment",
        hint=f"unset {inner.launcher.rank} and {inner.launcher.num_ranks} to join the ranks of "
        f"{outer.launcher.name}, or start the ranks with torchrun",
    )


def _shown(names: tuple[str, ...] | list[str], environment: Environment) -> str:
    return " ".join(f"{name}={environment[name]}" for name in names if name in environment)
