"""Buffers of a module that forward changes, such as running statistics: no gradient keeps them equal."""

from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.checkpoint.load_weights import persistent_buffers
from meshwright.mesh import Mesh


class SharedBuffers:
    """The persistent buffers of this rank's modules; all data-parallel ranks take the values of the first."""

    def __init__(self, modules: Sequence[nn.Module], mesh: Mesh) -> None:
        self._group = mesh.data.get_group("data")
        self._by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        for buffer in persistent_buffers(modules).values():
            self._by_dtype[buffer.dtype].append(buffer)

    @torch.no_grad()
    def broadcast(self) -> None:
        """Broadcast the first rank's values; every data-parallel rank calls it. No host sync."""
        if self._group.size() == 1:
            return
        for buffers in self._by_dtype.values():
            flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
            dist.broadcast(flat, group=self._group, group_src=0)
            for buffer, piece in zip(buffers, flat.split([one.numel() for one in buffers]), strict=True):
                buffer.copy_(piece.view_as(buffer))
