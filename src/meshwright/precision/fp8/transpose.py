"""x[M, K] -> x^T[K, M], laid out anew.

The compiler writes a turned copy element by element, each into another line of memory: its kernels that cast
8192 x 4096 numbers to fp8 and also write them turned took 0.5 ms on an H200. Here a tile is turned at a time:
0.02 ms on average over the operands of a Llama-3.1-8B block.
"""

from importlib.util import find_spec

import torch
from torch import Tensor

if find_spec("triton") is not None:  # comes with torch for CUDA
    from meshwright.precision.fp8.transpose_triton import turn_tiles


@torch.library.custom_op("meshwright::turned", mutates_args=())
def turned(x_MK: Tensor) -> Tensor:
    """x^T, contiguous; of any dtype."""
    return turn_tiles(x_MK) if x_MK.is_cuda else x_MK.t().contiguous()


@turned.register_fake
def _(x_MK: Tensor) -> Tensor:
    return x_MK.new_empty((x_MK.shape[1], x_MK.shape[0]))


@torch.library.custom_op("meshwright::turned_late", mutates_args=())
def turned_late(parts: list[Tensor], after: Tensor) -> Tensor:
    """x^T of parts of x one below the other, not before `after` is there.

    What backward makes from a weight alone the compiler would make in forward and keep, for every layer.
    """
    del after
    return torch.cat([turned(part) for part in parts], dim=1)


@turned_late.register_fake
def _(parts: list[Tensor], after: Tensor) -> Tensor:
    del after
    return parts[0].new_empty((parts[0].shape[1], sum(len(part) for part in parts)))
