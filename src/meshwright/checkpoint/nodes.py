"""Which ranks share the folder of a node, and which node holds copies of whose files."""

import socket
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist


@dataclass(frozen=True)
class Nodes:
    """The nodes of a run: those of its ranks that see the same folder."""

    ranks: tuple[tuple[int, ...], ...]
    """Ranks of each node."""
    rank: int

    @property
    def node(self) -> int:
        """Number of the node of this rank."""
        return next(number for number, ranks in enumerate(self.ranks) if self.rank in ranks)

    @property
    def is_leader(self) -> bool:
        """Whether this is the rank that publishes and deletes on its node."""
        return self.rank == self.leader(self.node)

    def leader(self, node: int) -> int:
        """The first rank of a node."""
        return self.ranks[node][0]

    def copy_holder(self, rank: int) -> int:
        """The rank of the next node that holds a copy of this rank's file."""
        node = next(number for number, ranks in enumerate(self.ranks) if rank in ranks)
        following = self.ranks[(node + 1) % len(self.ranks)]
        return following[self.ranks[node].index(rank) % len(following)]


def find_nodes(folder: str) -> Nodes:
    """The nodes by host name and folder; all ranks call it. Communicates."""
    keys: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(keys, (socket.gethostname(), folder))
    ranks: dict[Any, list[int]] = {}
    for rank, key in enumerate(keys):
        ranks.setdefault(key, []).append(rank)
    return Nodes(tuple(map(tuple, ranks.values())), dist.get_rank())
