"""A tied embedding whose two uses are in different pipeline stages.

The first and the last stage each hold the embedding under the same name, start from the same values and must
stay equal: the gradients of both uses are summed before the norm, so both copies take the same step. Where
one rank has both stages (V-shaped schedules) only the first copy is updated and the other is copied from it.
The same holds for trained rows of single tokens, which both uses read.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from meshwright.mesh import Mesh
from meshwright.parallel.shards import ParameterShard
from meshwright.spec import ModelSpec
from meshwright.spec.adapter import EMBEDDING
from meshwright.spec.stages import V_SCHEDULES

TIED_NAMES = (EMBEDDING, "embedding.tokens.token_rows.change")


class TiedEmbedding:
    """The copies of the tied parameters on this rank, and the group of ranks that hold copies."""

    def __init__(self, tied: Sequence[Sequence[ParameterShard]], group: ProcessGroup | None) -> None:
        self._tied, self._group = tied, group

    @property
    def followers(self) -> Sequence[ParameterShard]:
        """Copies that take their values from the first one on this rank; not in optimizer or checkpoint."""
        return [copy for copies in self._tied for copy in copies[1:]]

    def sum_gradients(self) -> None:
        """Sum the gradients of all copies, after the reduction over data; all pipeline ranks call it."""
        for copies in self._tied:
            if copies[0].parameter.requires_grad:
                self._sum_gradients(copies)

    def _sum_gradients(self, copies: Sequence[ParameterShard]) -> None:
        total = copies[0].shard.grad
        assert total is not None
        for copy in copies[1:]:
            assert copy.shard.grad is not None
            total += copy.shard.grad
            copy.shard.grad = None
        if self._group is not None:
            dist.all_reduce(total, group=self._group)

    @torch.no_grad()
    def copy_to_followers(self) -> None:
        """Copy the first copy's values to the others, after it was updated or loaded."""
        for first, *others in self._tied:
            for copy in others:
                copy.shard.copy_(first.shard)


def find_tied_embedding(model: ModelSpec, mesh: Mesh, shards: list[ParameterShard]) -> TiedEmbedding:
    """The copies on this rank; communicates where two ranks hold copies (all ranks call it)."""
    parallel = mesh.parallel
    if not model.tied_head or parallel.num_stages == 1:
        return TiedEmbedding([], None)
    found = [[one for one in shards if one.name == name] for name in TIED_NAMES]
    tied = [copies for copies in found if copies]
    if parallel.schedule in V_SCHEDULES:  # rank 0 has the first and the last stage
        return TiedEmbedding(tied, None)
    pipeline = dist.get_process_group_ranks(mesh.group("pp"))
    is_end = mesh.rank in (pipeline[0], pipeline[-1])
    group = dist.new_group([pipeline[0], pipeline[-1]], use_local_synchronization=True) if is_end else None
    assert not isinstance(group, int)
    return TiedEmbedding(tied, group)
