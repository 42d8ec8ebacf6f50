"""The node of this process, where a platform starts one process per node."""

import pytest

from meshwright.errors import LaunchError
from meshwright.launch.launched import launched_rank
from meshwright.launch.launched_node import launched_node

# What the training operator sets in the second pod of a PyTorchJob with nprocPerNode: 4.
PYTORCHJOB = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "1",
    "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
    "WORLD_SIZE": "8",
    "RANK": "1",
}
TRAINJOB = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "auto",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29500",
}
SAGEMAKER = {
    "SM_HOSTS": '["algo-1", "algo-2"]',
    "SM_CURRENT_HOST": "algo-2",
    "SM_NUM_GPUS": "8",
    "SM_NETWORK_INTERFACE_NAME": "eth0",
}


def test_a_pod_of_a_pytorchjob_is_a_node_although_it_has_a_rank():
    node = launched_node(PYTORCHJOB)
    assert node is not None and (node.node, node.num_nodes, node.ranks_per_node) == (1, 2, 4)
    assert launched_rank(PYTORCHJOB) is None
    assert node.num_local_ranks(8) == 4
    assert node.rank_variables(2, 4) == {
        "RANK": "6",
        "LOCAL_RANK": "2",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "job-master-0",
        "MASTER_PORT": "23456",
    }
    rank = launched_rank({**PYTORCHJOB, **node.rank_variables(2, 4)})
    assert rank is not None and (rank.rank, rank.num_ranks, rank.num_local_ranks) == (6, 8, 4)


def test_a_pod_of_a_trainjob_leaves_the_ranks_to_the_run():
    node = launched_node(TRAINJOB)
    assert node is not None and (node.host, node.port) == ("job-node-0-0.job", 29500)
    assert node.num_local_ranks(8) == 4 and node.num_local_ranks(2) == 1


def test_a_host_of_sagemaker():
    node = launched_node(SAGEMAKER)
    assert node is not None
    assert (node.node, node.num_nodes, node.ranks_per_node, node.host) == (1, 2, 8, "algo-1")
    assert node.interface == "eth0" and node.num_local_ranks(16) == 8


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {**TRAINJOB, "PET_NNODES": "1"},
        {**SAGEMAKER, "SM_HOSTS": '["algo-2"]'},
        {**TRAINJOB, "TORCHELASTIC_RUN_ID": "x"},
        {**SAGEMAKER, "LOCAL_RANK": "0"},
    ],
)
def test_one_node_and_ranks_of_torchrun_are_no_nodes(environment):
    assert launched_node(environment) is None


@pytest.mark.parametrize(
    ("environment", "fact"),
    [
        ({**TRAINJOB, "PET_NNODES": "2:4"}, "PET_NNODES=2:4 lets the number of nodes change"),
        ({**TRAINJOB, "PET_NNODES": "x"}, "PET_NNODES='x' is not a number"),
        ({**TRAINJOB, "PET_NODE_RANK": "2"}, "PET_NODE_RANK=2 PET_NNODES=2 RANK=2 contradict"),
        ({**PYTORCHJOB, "RANK": "0"}, "PET_NODE_RANK=1 PET_NNODES=2 RANK=0 contradict"),
        ({"PET_NNODES": "2"}, "PET_NNODES=2 without PET_NODE_RANK"),
        ({"PET_NNODES": "2", "PET_NODE_RANK": "0"}, "neither PET_MASTER_ADDR nor MASTER_ADDR"),
        ({**TRAINJOB, "PET_NPROC_PER_NODE": "all"}, "PET_NPROC_PER_NODE='all' is not a number"),
        ({**SAGEMAKER, "SM_HOSTS": "algo-1"}, "SM_HOSTS='algo-1' is not a list of hosts"),
        ({**SAGEMAKER, "SM_HOSTS": "[1]"}, "SM_HOSTS='[1]' is not a list of hosts"),
        ({**SAGEMAKER, "SM_CURRENT_HOST": "algo-3"}, "SM_CURRENT_HOST=algo-3 is not in SM_HOSTS"),
    ],
)
def test_incomplete_or_contradictory_variables_are_refused(environment, fact):
    with pytest.raises(LaunchError) as caught:
        launched_node(environment)
    assert fact in caught.value.fact and caught.value.hint and caught.value.exit_code == 2


@pytest.mark.parametrize(("environment", "num_ranks"), [(PYTORCHJOB, 16), (SAGEMAKER, 8), (TRAINJOB, 3)])
def test_nodes_that_do_not_fit_the_mesh_are_refused(environment, num_ranks):
    node = launched_node(environment)
    assert node is not None
    with pytest.raises(LaunchError) as caught:
        node.num_local_ranks(num_ranks)
    assert f"parallel asks for {num_ranks} ranks" in caught.value.fact and caught.value.exit_code == 2
