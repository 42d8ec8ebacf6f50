"""A copy in host memory of what this rank saves, so that training goes on while the copy is written."""

from collections.abc import Mapping

import torch
from torch import Tensor

from meshwright.errors import RunError
from meshwright.memory.offload.budget import host_share
from meshwright.memory.offload.host import PinnedMemory, pageable_memory, synchronize

_ALIGNMENT_BYTES = 64


def snapshot_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of host memory that a copy of these tensors needs."""
    return sum(_aligned(tensor.nbytes) for tensor in tensors.values())


class HostSnapshot:
    """One buffer of host memory that every save reuses; pinned where the tensors are on a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer: Tensor | None = None
        self._pinned: PinnedMemory | None = None

    def reserve(self, tensors: Mapping[str, Tensor]) -> bool:
        """Allocate the buffer where it is missing or too small; False where the host has no room for it.

        Linux grants memory that it does not have, and kills a process later. So the free memory is compared.
        """
        needed = snapshot_bytes(tensors)
        if self._buffer is not None and self._buffer.nbytes >= needed:
            return True
        self._buffer = self._pinned = None
        if needed > host_share():
            return False
        try:
            self._buffer = self._allocate(needed)
        except (RunError, RuntimeError, MemoryError):  # not pinned, or not allocated
            return False
        return True

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy the tensors; they may change once this returns. The copies are valid until the next call."""
        assert self._buffer is not None, "reserve() comes first"
        copies, begin = {}, 0
        for name, tensor in tensors.items():
            part = self._buffer[begin : begin + tensor.nbytes]
            copies[name] = part.view(tensor.dtype).view(tensor.shape)
            copies[name].copy_(tensor.detach(), non_blocking=True)
            begin += _aligned(tensor.nbytes)
        synchronize(self._device)
        return copies

    def _allocate(self, num_bytes: int) -> Tensor:
        if self._device.type != "cuda":
            return pageable_memory(num_bytes)
        self._pinned = PinnedMemory()
        return self._pinned.allocate(num_bytes)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
