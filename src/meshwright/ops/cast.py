"""Dtypes of compute and of sums, and the cast at the end of a `torch.autograd.Function`.

torch 2.11's compiler fails silently on an output that two operations produced: a cast without effect after
the operation that made it, or a collective that wrote into it. It takes such an output for one without a
gradient and passes zeros to the Function's backward (2.13 does not; eager never did). So no Function here
ends in `.to`, `.float` or `.contiguous`, and collectives write into a view of an output.
"""

import torch
from torch import Tensor


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in `dtype`; x itself where it has that dtype already."""
    return x if x.dtype == dtype else x.to(dtype)


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which a matmul on x computes: autocast's where autocast is on, else that of x."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """The dtype of sums, norms and tables over x: float64 for float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
