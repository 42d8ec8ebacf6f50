"""Which node this process is, where a platform starts one process on each node. Imports no torch.

Kubernetes (Kubeflow's PyTorchJob and TrainJob) and SageMaker start the program once per node and say which
node this is; torchrun reads the same `PET_*` variables. `meshwright train` then starts the ranks of its node
by itself. Ranks that torchrun or another launcher has started have LOCAL_RANK and are not nodes.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from meshwright.errors import LaunchError

Environment = Mapping[str, str]
DEFAULT_PORT = 29500
WORLD_NUMBER = "MESHWRIGHT_WORLD"
"""The number of the world that a rank joins; ranks of different worlds never meet."""
_COUNTED_WORDS = ("auto", "gpu", "cpu", "xpu")


@dataclass(frozen=True)
class LaunchedNode:
    """This process among those that a platform has started, one per node."""

    platform: str
    node: int
    num_nodes: int
    ranks_per_node: int | None
    """Ranks on each node; None where the platform leaves it to the run."""
    host: str
    """Host of rank 0."""
    port: int
    variables: str
    """The variables that say so, with their values."""
    interface: str = ""
    """Network interface between the nodes, where the platform names it."""
    world: int = 0
    """Number of the world that these nodes are, where their number may change (`launch/node_world.py`)."""

    def num_local_ranks(self, num_ranks: int) -> int:
        """Ranks that this node starts of a run; LaunchError where the nodes do not fit the mesh."""
        each, rest = divmod(num_ranks, self.num_nodes)
        wanted = self.ranks_per_node
        if rest == 0 and wanted in (None, each):
            return each
        here = f"{self.num_nodes} nodes" + (f" of {wanted} ranks" if wanted is not None else "")
        raise LaunchError(
            f"parallel asks for {num_ranks} ranks, and {self.platform} has started {here} ({self.variables})",
            where="parallel",
            hint="change one axis of the mesh, or the number of nodes or ranks per node of the job",
        )

    def rank_variables(self, local_rank: int, num_here: int) -> dict[str, str]:
        """The variables of one rank on this node, as torchrun names them."""
        return {
            "RANK": str(self.node * num_here + local_rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(self.num_nodes * num_here),
            "LOCAL_WORLD_SIZE": str(num_here),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
            **({WORLD_NUMBER: str(self.world)} if self.world else {}),
        }


def launched_node(environment: Environment = os.environ) -> LaunchedNode | None:
    """The node that this process is, or None; LaunchError where variables are incomplete or contradict."""
    if "LOCAL_RANK" in environment or "TORCHELASTIC_RUN_ID" in environment:
        return None
    if "PET_NNODES" in environment:
        return _kubernetes_node(environment)
    if "SM_HOSTS" in environment and "RANK" not in environment:
        return _sagemaker_node(environment)
    return None


def _kubernetes_node(environment: Environment) -> LaunchedNode | None:
    """A pod of Kubeflow: `PET_*`, beside which a PyTorchJob sets RANK to the number of the pod."""
    num_nodes = _fixed_nodes(environment["PET_NNODES"])
    if num_nodes == 1:
        return None
    if "PET_NODE_RANK" not in environment:
        raise LaunchError(
            f"PET_NNODES={num_nodes} without PET_NODE_RANK: this process does not know its node",
            where="environment",
            hint="start the ranks with torchrun, which finds the other nodes by PET_RDZV_ENDPOINT",
        )
    node = number("PET_NODE_RANK", environment)
    _require_same_node(node, num_nodes, environment)
    ranks = environment.get("PET_NPROC_PER_NODE", "auto")
    host, port = _master(environment)
    shown = [name for name in ("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK") if name in environment]
    return LaunchedNode(
        platform="Kubernetes",
        node=node,
        num_nodes=num_nodes,
        ranks_per_node=None if ranks in _COUNTED_WORDS else number("PET_NPROC_PER_NODE", environment),
        host=host,
        port=port,
        variables=" ".join(f"{name}={environment[name]}" for name in shown),
    )


def _fixed_nodes(text: str) -> int:
    low, _, high = text.partition(":")
    if high and high != low:
        raise LaunchError(
            f"PET_NNODES={text} lets the number of nodes change, and a mesh has a fixed number of ranks",
            where="environment",
            hint="set minReplicas and maxReplicas to the largest number of nodes, and "
            "resilience.elastic.min_ranks to the fewest ranks; or start with torchrun",
        )
    return number("PET_NNODES", {"PET_NNODES": low})


def _require_same_node(node: int, num_nodes: int, environment: Environment) -> None:
    rank = environment.get("RANK", str(node))
    if node >= num_nodes or rank != str(node):
        raise LaunchError(
            f"PET_NODE_RANK={node} PET_NNODES={num_nodes} RANK={rank} contradict each other",
            where="environment",
            hint="leave the variables as the platform sets them; RANK is the number of the pod there",
        )


def _master(environment: Environment) -> tuple[str, int]:
    """Host and port of node 0; the port has torchrun's default."""
    endpoint, _, endpoint_port = environment.get("PET_RDZV_ENDPOINT", "").rpartition(":")
    host = environment.get("PET_MASTER_ADDR") or environment.get("MASTER_ADDR") or endpoint
    if not host:
        raise LaunchError(
            "nodes are numbered, and neither PET_MASTER_ADDR nor MASTER_ADDR names the first of them",
            where="environment",
            hint="set MASTER_ADDR to the host of node 0",
        )
    for name in ("PET_MASTER_PORT", "MASTER_PORT"):
        if environment.get(name):
            return host, number(name, environment)
    return host, int(endpoint_port) if endpoint_port.isdecimal() else DEFAULT_PORT


def _sagemaker_node(environment: Environment) -> LaunchedNode | None:
    """A host of a SageMaker training job: SM_HOSTS lists all, SM_CURRENT_HOST is this one."""
    hosts, here = _host_names(environment["SM_HOSTS"]), environment.get("SM_CURRENT_HOST", "")
    if len(hosts) == 1:
        return None
    if here not in hosts:
        raise LaunchError(
            f"SM_CURRENT_HOST={here} is not in SM_HOSTS={environment['SM_HOSTS']}",
            where="environment",
            hint="leave both as SageMaker sets them, or unset them",
        )
    gpus = number("SM_NUM_GPUS", environment) if "SM_NUM_GPUS" in environment else 0
    return LaunchedNode(
        platform="SageMaker",
        node=hosts.index(here),
        num_nodes=len(hosts),
        ranks_per_node=gpus or None,
        host=environment.get("MASTER_ADDR") or hosts[0],
        port=number("MASTER_PORT", environment) if environment.get("MASTER_PORT") else DEFAULT_PORT,
        variables=f"SM_HOSTS={environment['SM_HOSTS']} SM_NUM_GPUS={gpus}",
        interface=environment.get("SM_NETWORK_INTERFACE_NAME", ""),
    )


def _host_names(text: str) -> list[str]:
    try:
        found: Any = json.loads(text)
    except ValueError:
        found = None
    names = cast(list[Any], found) if isinstance(found, list) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise LaunchError(
            f"SM_HOSTS={text!r} is not a list of hosts", where="environment", hint='such as ["algo-1"]'
        )
    return cast(list[str], names)


def number(name: str, environment: Environment) -> int:
    """The number in a variable; LaunchError for anything else."""
    text = environment[name]
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise LaunchError(
            f"{name}={text!r} is not a number",
            where="environment",
            hint="start the ranks with torchrun, srun, mpirun or `meshwright train`, or unset it",
        )
    return int(text)
