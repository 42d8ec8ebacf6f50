"""A tied embedding whose two uses stand in different stages.

The first and the last stage each hold the table under the same name, start from the same values and must
stay equal: the gradients of both uses are summed before the norm, so both copies make the same step. Where
one rank has both stages (V-shaped schedules) only the first copy is updated and the other follows it.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from meshwright.mesh import Mesh
from meshwright.parallel.shards import ParameterShard
from meshwright.spec import ModelSpec
from meshwright.spec.stages import V_SCHEDULES

TIED_NAME = "embedding.tokens.weight"


class TiedTable:
    """The copies of a tied table on this rank, and the group that holds the others."""

    def __init__(self, copies: Sequence[ParameterShard], group: ProcessGroup | None) -> None:
        self._copies, self._group = copies, group

    @property
    def followers(self) -> Sequence[ParameterShard]:
        """Copies that take their values from the first one here: no optimizer, no checkpoint knows them."""
        return self._copies[1:]

    def sum_gradients(self) -> None:
        """After the reduction over data ranks; all pipeline ranks call it."""
        if not self._copies:
            return
        total = self._copies[0].shard.grad
        assert total is not None
        for copy in self.followers:
            assert copy.shard.grad is not None
            total += copy.shard.grad
            copy.shard.grad = None
        if self._group is not None:
            dist.all_reduce(total, group=self._group)

    @torch.no_grad()
    def follow(self) -> None:
        """After the first copy was updated or loaded."""
        for copy in self.followers:
            copy.shard.copy_(self._copies[0].shard)


def tie(model: ModelSpec, mesh: Mesh, shards: list[ParameterShard]) -> TiedTable:
    """Find the copies; communicates where they stand on two ranks (all ranks call it)."""
    parallel = mesh.parallel
    if not model.tied_head or parallel.num_stages == 1:
        return TiedTable([], None)
    copies = [one for one in shards if one.name == TIED_NAME]
    if parallel.schedule in V_SCHEDULES:  # rank 0 has the first and the last stage
        return TiedTable(copies, None)
    pipeline = dist.get_process_group_ranks(mesh.group("pp"))
    is_end = mesh.rank in (pipeline[0], pipeline[-1])
    group = dist.new_group([pipeline[0], pipeline[-1]], use_local_synchronization=True) if is_end else None
    assert not isinstance(group, int)
    return TiedTable(copies, group)
