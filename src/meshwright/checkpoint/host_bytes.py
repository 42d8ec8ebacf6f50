"""The memory of host tensors as bytes."""

import ctypes

from torch import Tensor


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, not copied; valid while the tensor lives.

    Not by `numpy()`: torch refuses to resize a storage that numpy has seen, and offload resizes storages.
    """
    num_bytes = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * num_bytes).from_address(tensor.data_ptr())).cast("B")
