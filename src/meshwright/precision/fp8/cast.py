"""Numbers to fp8 with a known scale, as they lie and turned, and how large they are: one pass over them.

The compiler would write the fp8 numbers once for the matmul and once more for an operator that turns them,
and work out the scale again for every number; its kernels ran at 2.4 to 3 TB/s on an H200.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.precision.fp8.quantise import encode

if find_spec("triton") is not None:  # comes with torch for CUDA
    from meshwright.precision.fp8.cast_triton import cast_tiles

TILE = 128
"""Rows and columns of the parts whose largest magnitudes are told."""


class Cast(NamedTuple):
    """x[M, K] in fp8, twice."""

    values_MK: Tensor
    turned_KM: Tensor
    largest: Tensor
    """Magnitudes, fp32, whose maximum is that of x, inf where x holds a nan; none if not asked for."""


def cast_and_turn(parts: Sequence[Tensor], unit: Tensor, dtype: torch.dtype, *, noting: bool = False) -> Cast:
    """Matrices that stand side by side, as one; `noting`: how large they are as well."""
    return Cast(*_cast_and_turn(list(parts), unit, dtype, noting))


@torch.library.custom_op("meshwright::cast_and_turn", mutates_args=())
def _cast_and_turn(
    parts: list[Tensor],
    unit: Tensor,
    dtype: torch.dtype,
    noting: bool,  # noqa: FBT001 - an operator's schema
) -> tuple[Tensor, Tensor, Tensor]:
    cast, widths = _room(parts, unit, dtype, noting=noting), [part.shape[1] for part in parts]
    columns = cast.values_MK.split(widths, 1), cast.turned_KM.split(widths)
    tiles = cast.largest.split([_num_tiles(part) if noting else 0 for part in parts])
    for part, values, turned, largest in zip(parts, *columns, tiles, strict=True):
        write_cast(part, unit, values, turned, largest if noting else None)
    return cast


@_cast_and_turn.register_fake
def _(
    parts: list[Tensor],
    unit: Tensor,
    dtype: torch.dtype,
    noting: bool,  # noqa: FBT001
) -> tuple[Tensor, Tensor, Tensor]:
    return _room(parts, unit, dtype, noting=noting)


@torch.library.custom_op("meshwright::turned_cast_late", mutates_args=())
def turned_cast_late(parts: list[Tensor], unit: Tensor, dtype: torch.dtype, after: Tensor) -> Tensor:
    """x^T in fp8 of parts of x one below the other, not before `after` is there: see `turned_late`."""
    del after
    turned_KM = _turned_room(parts, dtype)
    for part, turned in zip(parts, turned_KM.split([len(part) for part in parts], 1), strict=True):
        write_cast(part, unit, torch.empty_like(part, dtype=dtype), turned)
    return turned_KM


@turned_cast_late.register_fake
def _(parts: list[Tensor], unit: Tensor, dtype: torch.dtype, after: Tensor) -> Tensor:
    del unit, after
    return _turned_room(parts, dtype)


def _turned_room(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return parts[0].new_empty((parts[0].shape[1], sum(len(part) for part in parts)), dtype=dtype)


def write_cast(
    x_MK: Tensor, unit: Tensor, values_MK: Tensor, turned_KM: Tensor, largest: Tensor | None = None
) -> None:
    """The same into memory that is there, which may be columns of wider matrices."""
    if x_MK.is_cuda and x_MK.dtype != torch.float64:
        cast_tiles(x_MK, unit, values_MK, turned_KM, largest)
        return
    values_MK.copy_(encode(x_MK, unit, values_MK.dtype, None).values_MK)
    turned_KM.copy_(values_MK.t())
    if largest is not None:
        largest.copy_(x_MK.abs().amax().nan_to_num(torch.inf))


def _room(parts: Sequence[Tensor], unit: Tensor, dtype: torch.dtype, *, noting: bool) -> Cast:
    num_rows, num_columns = parts[0].shape[0], sum(part.shape[1] for part in parts)
    return Cast(
        parts[0].new_empty((num_rows, num_columns), dtype=dtype),
        parts[0].new_empty((num_columns, num_rows), dtype=dtype),
        unit.new_empty(sum(_num_tiles(part) for part in parts) if noting else 0),
    )


def _num_tiles(x_MK: Tensor) -> int:
    return -(-x_MK.shape[0] // TILE) * -(-x_MK.shape[1] // TILE)
