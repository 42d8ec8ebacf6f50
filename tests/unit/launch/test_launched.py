"""The rank of this process, from the variables of each launcher, and where the ranks meet."""

from pathlib import Path

import pytest

from meshwright.errors import LaunchError
from meshwright.launch.launched import (
    CRAY,
    HYDRA,
    OPEN_MPI,
    SLURM,
    TORCHRUN,
    LaunchedRank,
    is_local_rank,
    launched_rank,
)
from meshwright.launch.meeting import StoreAddress, StoreFile, find_meeting, first_host

TORCHRUN_TASK = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
SRUN_TASK = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
MPIRUN_TASK = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


def test_each_launcher_is_joined():
    assert launched_rank(TORCHRUN_TASK) == LaunchedRank(TORCHRUN, 3, 8, 1, 2)
    assert launched_rank(SRUN_TASK) == LaunchedRank(SLURM, 3, 4, 1, 2)
    assert launched_rank(MPIRUN_TASK) == LaunchedRank(OPEN_MPI, 1, 2, 1, 2)
    assert launched_rank({}) is None


@pytest.mark.parametrize(
    "shell",
    [
        {**SRUN_TASK, "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # srun -n1
        {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},  # sbatch
        {**SRUN_TASK, "SLURM_STEP_ID": "4294967290"},  # salloc with use_interactive_step
        {**SRUN_TASK, "SLURM_STEP_NUM_TASKS": "1"},  # srun --pty inside of a job of four tasks
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
    ],
)
def test_a_shell_or_a_single_task_is_no_rank(shell):
    assert launched_rank(shell) is None


def test_a_launcher_inside_of_another_counts():
    by_torchrun = {**SRUN_TASK, **TORCHRUN_TASK, "TORCHELASTIC_RUN_ID": "x"}
    assert launched_rank(by_torchrun) == LaunchedRank(TORCHRUN, 3, 8, 1, 2)
    by_us = {**SRUN_TASK, "RANK": "0", "WORLD_SIZE": "1", "MESHWRIGHT_LOCAL_RANKS": "1"}
    assert launched_rank(by_us) is not None and is_local_rank(by_us)
    image = {**SRUN_TASK, "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}  # a container's hook copies them
    assert launched_rank(image) == LaunchedRank(TORCHRUN, 3, 4, 1, None)
    deepspeed = {**SRUN_TASK, "RANK": "13", "WORLD_SIZE": "16", "LOCAL_RANK": "1"}  # four ranks by each task
    assert launched_rank(deepspeed) == LaunchedRank(TORCHRUN, 13, 16, 1, None)
    both = {**SRUN_TASK, **MPIRUN_TASK}
    assert launched_rank(both) == LaunchedRank(OPEN_MPI, 1, 2, 1, 2)


@pytest.mark.parametrize(
    ("changed", "fact"),
    [
        ({**SRUN_TASK, "RANK": "0", "WORLD_SIZE": "1"}, "RANK=0 WORLD_SIZE=1 contradict SLURM_PROCID=3"),
        ({**SRUN_TASK, "RANK": "0", "WORLD_SIZE": "4"}, "contradict SLURM_PROCID=3 SLURM_NTASKS=4"),
        ({**SRUN_TASK, "SLURM_NTASKS": "2"}, "SLURM_NTASKS=2 contradicts SLURM_STEP_NUM_TASKS=4"),
        ({**SRUN_TASK, "SLURM_PROCID": "4"}, "SLURM_PROCID=4 SLURM_NTASKS=4: the rank is outside"),
        ({**SRUN_TASK, "SLURM_PROCID": "x"}, "SLURM_PROCID='x' is not a number"),
        ({key: SRUN_TASK[key] for key in SRUN_TASK if key != "SLURM_PROCID"}, "without SLURM_PROCID"),
        ({"RANK": "3"}, "RANK=3 without WORLD_SIZE"),
        ({**TORCHRUN_TASK, "WORLD_SIZE": "-1"}, "WORLD_SIZE='-1' is not a number"),
        ({**TORCHRUN_TASK, "LOCAL_RANK": "2"}, "LOCAL_RANK=2 LOCAL_WORLD_SIZE=2 contradict each other"),
        ({**MPIRUN_TASK, "RANK": "0", "WORLD_SIZE": "2"}, "contradict OMPI_COMM_WORLD_RANK=1"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "without OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_LOCAL_RANK"),
    ],
)
def test_contradictory_or_incomplete_variables_are_refused_with_their_values(changed, fact):
    with pytest.raises(LaunchError) as caught:
        launched_rank(changed)
    assert fact in caught.value.fact and caught.value.hint and caught.value.exit_code == 2


def _meeting(task: dict[str, str], **more: str) -> StoreAddress | StoreFile:
    environment = {**task, **more}
    launched = launched_rank(environment)
    assert launched is not None
    return find_meeting(launched, environment)


def test_where_ranks_meet():
    named = _meeting(
        TORCHRUN_TASK, MASTER_ADDR="h0", MASTER_PORT="29500", TORCHELASTIC_USE_AGENT_STORE="True"
    )
    assert named == StoreAddress("h0", 29500, True, "0", "MASTER_ADDR=h0 and MASTER_PORT=29500")
    slurm = _meeting(SRUN_TASK)
    assert isinstance(slurm, StoreAddress) and slurm.host == "n1" and not slurm.is_hosted_by_agent
    another = _meeting(SRUN_TASK, SLURM_STEP_ID="1")
    assert isinstance(another, StoreAddress) and another.port != slurm.port
    assert _meeting(MPIRUN_TASK, MASTER_PORT="29501") == StoreAddress(
        "127.0.0.1", 29501, False, "0", "all ranks on this host and MASTER_PORT=29501"
    )
    assert _meeting(TORCHRUN_TASK, MESHWRIGHT_STORE_FILE="/tmp/s") == StoreFile(Path("/tmp/s"))


@pytest.mark.parametrize(
    ("more", "fact"),
    [
        ({}, "8 ranks were started, and MASTER_ADDR is not set"),
        ({"MASTER_ADDR": "h0"}, "8 ranks were started, and MASTER_PORT is not set"),
        *(
            ({"MASTER_ADDR": "h0", "MASTER_PORT": port}, f"MASTER_PORT={port!r} is not a port")
            for port in ("x", "0", "-1", "65536", "9" * 400)
        ),
    ],
)
def test_an_address_that_is_missing_or_malformed_is_refused(more, fact):
    with pytest.raises(LaunchError) as caught:
        _meeting(TORCHRUN_TASK, **more)
    assert caught.value.fact == fact and ("MASTER" in caught.value.hint or "65535" in caught.value.hint)


def test_mpirun_is_shown_how_to_name_the_address():
    elsewhere = {**MPIRUN_TASK, "OMPI_COMM_WORLD_SIZE": "4"}
    with pytest.raises(LaunchError) as caught:
        _meeting(elsewhere)
    assert "mpirun -x MASTER_ADDR=HOST" in caught.value.hint


@pytest.mark.parametrize(
    ("names", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[001-004,9],m1", "n001"),
        ("n[7,9]", "n7"),
        ("rack[1-2]node[3-4]", "rack1node3"),
        ("a-b.example", "a-b.example"),
    ],
)
def test_the_first_host_of_a_list_of_slurm(names, first):
    assert first_host(names) == first


HYDRA_TASK = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
CRAY_TASK = {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"}


def test_process_managers_of_mpi_are_joined():
    assert launched_rank(HYDRA_TASK) == LaunchedRank(HYDRA, 3, 4, 1, 2)
    assert launched_rank(CRAY_TASK) == LaunchedRank(CRAY, 3, 4, 1, 2)
    assert launched_rank({**HYDRA_TASK, "PMI_SIZE": "1", "PMI_RANK": "0"}) is None
    # srun --mpi=pmi2 and --mpi=pmix set these beside its own variables, which count.
    by_srun = {**SRUN_TASK, "PMI_RANK": "3", "PMI_SIZE": "4", "PMIX_RANK": "3"}
    assert launched_rank(by_srun) == LaunchedRank(SLURM, 3, 4, 1, 2)
    assert launched_rank({**MPIRUN_TASK, "PMIX_RANK": "1"}) == LaunchedRank(OPEN_MPI, 1, 2, 1, 2)
    with pytest.raises(LaunchError, match="PMIX_RANK=2, and no variable says how many ranks"):
        launched_rank({"PMIX_RANK": "2"})
    with pytest.raises(LaunchError, match="without MPI_LOCALRANKID"):
        launched_rank({"PMI_RANK": "3", "PMI_SIZE": "4"})


def test_a_hook_of_a_container_that_sets_a_world_of_one_is_no_launch():
    """enroot's hook for PyTorch images sets RANK from SLURM, also in a shell of one task."""
    hook = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "n1", "MASTER_PORT": "61234"}
    shell = {**SRUN_TASK, "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
    assert launched_rank({**shell, **hook}) is None
    assert launched_rank(hook) is None
    by_torchrun = {**hook, "TORCHELASTIC_RUN_ID": "x"}
    assert launched_rank(by_torchrun) == LaunchedRank(TORCHRUN, 0, 1, 0, None)
