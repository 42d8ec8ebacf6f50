"""Counts of the elements of a tensor by the exponent of their magnitude."""

import torch
from torch import Tensor

# Elements that are counted at a time: the memory of a count does not grow with the tensor.
_CHUNK_ELEMENTS = 1 << 21
ZEROS, NOT_FINITE, ABOVE_E4M3, ABOVE_E5M2 = range(4)
NUM_OTHER = 4
"""Counts after the bins: zeros, elements that are not finite, and finite ones above the two fp8 formats."""
_LARGEST = {ABOVE_E4M3: 448.0, ABOVE_E5M2: 57344.0}


def count_magnitudes(x: Tensor, *, lowest: int, num_bins: int, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """(counts [num_bins + NUM_OTHER], the largest finite magnitude) of factor x.

    Bin e - lowest counts magnitudes in [2^e, 2^(e + 1)), and the bins at the ends count all beyond them.
    """
    counts = torch.zeros(num_bins + NUM_OTHER, dtype=torch.int64, device=x.device)
    amax = torch.zeros((), dtype=torch.float64, device=x.device)
    for part in x.detach().reshape(-1).split(_CHUNK_ELEMENTS):
        magnitude = part.to(torch.promote_types(part.dtype, torch.float32)).abs() * factor
        is_finite = magnitude.isfinite()
        finite = torch.where(is_finite, magnitude, 0.0)
        # frexp: magnitude = m 2^e with m in [0.5, 1)
        index = (torch.frexp(finite).exponent.long() - 1 - lowest).clamp(0, num_bins - 1)
        index = torch.where(finite == 0, num_bins + ZEROS, index)
        index = torch.where(is_finite, index, num_bins + NOT_FINITE)
        counts += torch.bincount(index, minlength=num_bins + NUM_OTHER)
        for column, largest in _LARGEST.items():
            counts[num_bins + column] += (finite > largest).sum()
        if finite.numel():
            amax = torch.maximum(amax, finite.amax().double())
    return counts, amax
