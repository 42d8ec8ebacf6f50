"""Nested NF4 (double quantisation): the absmax of a matrix in 8 bits, as bitsandbytes stores it.

    offset          = the mean of all absmax of the matrix
    nested[i]       = the largest magnitude of 256 consecutive (absmax - offset), row after row
    code[n, k / 64] = the nearest of 256 values in [-1, 1] to (absmax - offset) / nested
    absmax'         = value[code] nested + offset, in fp32

256 absmax may cross rows, so the numbers of a shard depend on the full matrix. Codes are sharded with their
weights. `nested` (4 bytes per 16,384 weights) is on every rank, together with the offset and the 256 values:
the table. A shard reads it by the place of its first absmax in the matrix.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

NESTED_BLOCK = 256
_NUM_VALUES = 256
_EXPONENTS = 7


class NestedPlace(NamedTuple):
    """Where a shard of the absmax lies in its matrix."""

    row: int
    column: int
    width: int
    """Absmax in a row of the full matrix."""


class NestedTable(nn.Module):
    """The table of one matrix, and the place of the part that this rank computes with."""

    value: Tensor

    def __init__(self, num_rows: int, num_columns: int) -> None:
        super().__init__()
        self.place = NestedPlace(0, 0, num_columns)
        size = 1 + _NUM_VALUES + -(-num_rows * num_columns // NESTED_BLOCK)
        # Not persistent: it is set with the weights, whenever they are loaded.
        self.register_buffer("value", torch.empty(size, device="meta"), persistent=False)


@torch.no_grad()
def nest_absmax(absmax: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of the shape of a full matrix's absmax (fp32), and the matrix's table."""
    flat = absmax.cpu().flatten()  # the mean has the bits of the CPU's sum on any device
    offset = flat.mean()
    centred = torch.nn.functional.pad(flat - offset, (0, -len(flat) % NESTED_BLOCK))
    blocks = centred.unflatten(0, (-1, NESTED_BLOCK))
    nested = blocks.abs().amax(1)
    values = torch.tensor(dynamic_values())
    normalised = blocks * (1.0 / torch.where(nested == 0, 1.0, nested))[:, None]
    codes = torch.bucketize(normalised, (values[1:] + values[:-1]) / 2, out_int32=True).to(torch.uint8)
    table = torch.cat([offset[None], values, nested])
    return codes.flatten()[: len(flat)].view_as(absmax).to(absmax.device), table.to(absmax.device)


def unnest_absmax(codes: Tensor, table: Tensor, place: NestedPlace) -> Tensor:
    """The absmax' of a shard, fp32."""
    rows = place.row + torch.arange(codes.shape[0], device=codes.device)
    columns = place.column + torch.arange(codes.shape[1], device=codes.device)
    blocks = (rows[:, None] * place.width + columns).div(NESTED_BLOCK, rounding_mode="floor")
    return table[1 + codes.int()] * table[1 + _NUM_VALUES + blocks] + table[0]


@cache
def dynamic_values() -> tuple[float, ...]:
    """The 256 values of an 8-bit number with a variable exponent: 10^-6 to 1, finer near 1, and zero."""
    found = [0.0, 1.0]
    for exponent in range(_EXPONENTS):
        bounds = torch.linspace(0.1, 1, 2**exponent + 1, dtype=torch.float32)
        means = 10 ** (exponent - _EXPONENTS + 1) * ((bounds[:-1] + bounds[1:]) / 2)
        found += [*means.tolist(), *(-means).tolist()]
    return tuple(sorted(found))
