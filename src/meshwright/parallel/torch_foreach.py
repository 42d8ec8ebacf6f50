"""Operations on lists of tensors in one kernel. Torch has no public names for its foreach kernels.

A loop over the tensors would launch one kernel for each: hundreds of small ones per step.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def zero_all(tensors: Sequence[Tensor]) -> None:
    """Set every tensor to zero, in place."""
    torch._foreach_zero_(list(tensors))


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source to its target, in place."""
    torch._foreach_copy_(list(targets), list(sources))


def divide_all(tensors: Sequence[Tensor], divisor: Tensor) -> None:
    """Divide every tensor by one scalar tensor, in place. No host sync."""
    torch._foreach_div_(list(tensors), divisor)
