"""The cast at the end of a `torch.autograd.Function`.

torch 2.11 takes an output that a cast without effect handed through for one without a gradient: compiled, the
Function's backward is then given zeros, without a word (2.13 does not; eager never did). So no Function here
ends in `.to`, `.float` or `.contiguous`.
"""

import torch
from torch import Tensor


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in `dtype`; x itself where it has it already."""
    return x if x.dtype == dtype else x.to(dtype)
