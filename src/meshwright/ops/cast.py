"""The cast at the end of a `torch.autograd.Function`, and what else torch 2.11 cannot bear there.

Its compiler takes an output that two operations gave, a cast without effect after the one that made it, or a
collective that wrote into it, for one without a gradient: the Function's backward is then given zeros,
without a word (2.13 does not; eager never did). So no Function here ends in `.to`, `.float` or `.contiguous`,
and what is written by others is written through a view.
"""

import torch
from torch import Tensor


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in `dtype`; x itself where it has it already."""
    return x if x.dtype == dtype else x.to(dtype)
