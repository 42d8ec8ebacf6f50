"""A tied embedding whose two uses are in different pipeline stages.

The first and the last stage each hold the embedding under the same name, start from the same values and must
stay equal: the gradients of both uses are summed before the norm, so both copies take the same step. Where
one rank has both stages (V-shaped schedules) only the first copy is updated and the other is copied from it.
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


class TiedEmbedding:
    """The copies of a tied embedding on this rank, and the group of ranks that hold copies."""

    def __init__(self, copies: Sequence[ParameterShard], group: ProcessGroup | None) -> None:
        self._copies, self._group = copies, group

    @property
    def followers(self) -> Sequence[ParameterShard]:
        """Copies that take their values from the first one on this rank; not in optimizer or checkpoint."""
        return self._copies[1:]

    def sum_gradients(self) -> None:
        """Sum the gradients of all copies, after the reduction over data; all pipeline ranks call it."""
        if not self._copies or not self._copies[0].parameter.requires_grad:
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
    def copy_to_followers(self) -> None:
        """Copy the first copy's values to the others, after it was updated or loaded."""
        for copy in self.followers:
            copy.shard.copy_(self._copies[0].shard)


def find_tied_embedding(model: ModelSpec, mesh: Mesh, shards: list[ParameterShard]) -> TiedEmbedding:
    """The copies on this rank; communicates where two ranks hold copies (all ranks call it)."""
    parallel = mesh.parallel
    if not model.tied_head or parallel.num_stages == 1:
        return TiedEmbedding([], None)
    copies = [one for one in shards if one.name == TIED_NAME]
    if parallel.schedule in V_SCHEDULES:  # rank 0 has the first and the last stage
        return TiedEmbedding(copies, None)
    pipeline = dist.get_process_group_ranks(mesh.group("pp"))
    is_end = mesh.rank in (pipeline[0], pipeline[-1])
    group = dist.new_group([pipeline[0], pipeline[-1]], use_local_synchronization=True) if is_end else None
    assert not isinstance(group, int)
    return TiedEmbedding(copies, group)
