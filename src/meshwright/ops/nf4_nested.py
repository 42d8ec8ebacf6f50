"""Nested NF4 (double quantisation): the absmax of a matrix in 8 bits, as bitsandbytes stores it.

    offset          = the mean of all absmax of the matrix
    nested[i]       = the largest magnitude of 256 consecutive (absmax - offset), row after row
    code[n, k / 64] = the nearest of 256 values in [-1, 1] to (absmax - offset) / nested
    absmax'         = value[code] nested + offset, in fp32

256 absmax may cross rows, so the numbers of a shard depend on the full matrix. Codes are sharded with their
weights. `nested` (4 bytes per 16,384 weights) is on every rank, together with the offset and the 256 values:
the table. A shard reads it by the place of its first absmax in the matrix.

Stacked experts are matrices of their own: each has an offset and its own `nested`. Their table has those of
all experts that a rank computes with, and the 256 values once:

    table = offset[E], value[256], nested[E, blocks]
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

NESTED_BLOCK = 256
_NUM_VALUES = 256
_EXPONENTS = 7


class NestedPlace(NamedTuple):
    """Where a shard of the absmax lies in its matrix, or in the stacked matrices of its table."""

    row: int
    column: int
    width: int
    """Absmax in a row of the full matrix."""
    expert: int = 0
    """The first expert of the shard, counted from the first one of the table."""
    num_experts: int = 1
    """Matrices in the table."""


class NestedTable(nn.Module):
    """The table of a matrix or of stacked ones, and the place of the part that this rank computes with."""

    value: Tensor

    def __init__(self, *shape: int) -> None:
        super().__init__()
        *stacked, self.num_rows, width = shape
        self.first_expert, self.num_experts = 0, stacked[0] if stacked else 1
        self.place = NestedPlace(0, 0, width, 0, self.num_experts)
        self._allocate()

    def set_place(self, held: tuple[slice, ...]) -> None:
        """Set the slices of the absmax that this rank computes with: the table has their experts alone."""
        *stacked, rows, columns = held
        if stacked:
            self.first_expert, self.num_experts = stacked[0].start, stacked[0].stop - stacked[0].start
            self._allocate()
        self.place = self.place_of((*stacked, rows, columns))

    def place_of(self, held: tuple[slice, ...]) -> NestedPlace:
        """The place of any slices of the absmax whose experts are in the table."""
        *stacked, rows, columns = held
        expert = stacked[0].start - self.first_expert if stacked else 0
        return NestedPlace(rows.start, columns.start, self.place.width, expert, self.num_experts)

    @property
    def experts(self) -> slice:
        """The experts of the table."""
        return slice(self.first_expert, self.first_expert + self.num_experts)

    def _allocate(self) -> None:
        blocks = -(-self.num_rows * self.place.width // NESTED_BLOCK)
        size = _NUM_VALUES + self.num_experts * (1 + blocks)
        # Not persistent: it is set with the weights, whenever they are loaded.
        self.register_buffer("value", torch.empty(size, device="meta"), persistent=False)


@torch.no_grad()
def nest_absmax(absmax: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of the shape of full matrices' absmax (fp32), and their table: of one matrix, or stacked ones."""
    flat_EM = absmax.cpu().reshape(-1, absmax.shape[-2] * absmax.shape[-1])
    # One mean after the other: it has the bits of the CPU's sum of one matrix, on any device.
    offset_E = torch.stack([one.mean() for one in flat_EM])
    centred = torch.nn.functional.pad(flat_EM - offset_E[:, None], (0, -flat_EM.shape[1] % NESTED_BLOCK))
    blocks = centred.unflatten(1, (-1, NESTED_BLOCK))
    nested = blocks.abs().amax(2)
    values = torch.tensor(dynamic_values())
    normalised = blocks * (1.0 / torch.where(nested == 0, 1.0, nested))[..., None]
    codes = torch.bucketize(normalised, (values[1:] + values[:-1]) / 2, out_int32=True).to(torch.uint8)
    table = torch.cat([offset_E, values, nested.flatten()])
    codes = codes.flatten(1)[:, : flat_EM.shape[1]].reshape(absmax.shape)
    return codes.to(absmax.device), table.to(absmax.device)


def unnest_absmax(codes: Tensor, table: Tensor, place: NestedPlace) -> Tensor:
    """The absmax' of a shard, fp32."""
    num_rows, num_columns = codes.shape[-2:]
    rows = place.row + torch.arange(num_rows, device=codes.device)
    columns = place.column + torch.arange(num_columns, device=codes.device)
    blocks = (rows[:, None] * place.width + columns).div(NESTED_BLOCK, rounding_mode="floor")
    num_experts = codes.shape[:-2].numel()  # 1 for a matrix
    held = slice(place.expert, place.expert + num_experts)
    offset_E, values, nested = table.split(_parts(table, place))
    nested_EB = nested.view(place.num_experts, -1)[held]
    scales = nested_EB[:, blocks] * values[codes.int().view(num_experts, num_rows, num_columns)]
    return (scales + offset_E[held, None, None]).view(codes.shape)


def _parts(table: Tensor, place: NestedPlace) -> list[int]:
    """Sizes of the offsets, the values and the scales in a table."""
    return [place.num_experts, _NUM_VALUES, len(table) - place.num_experts - _NUM_VALUES]


@cache
def dynamic_values() -> tuple[float, ...]:
    """The 256 values of an 8-bit number with a variable exponent: 10^-6 to 1, finer near 1, and zero."""
    found = [0.0, 1.0]
    for exponent in range(_EXPONENTS):
        bounds = torch.linspace(0.1, 1, 2**exponent + 1, dtype=torch.float32)
        means = 10 ** (exponent - _EXPONENTS + 1) * ((bounds[:-1] + bounds[1:]) / 2)
        found += [*means.tolist(), *(-means).tolist()]
    return tuple(sorted(found))
