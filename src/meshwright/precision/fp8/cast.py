"""Cast to fp8 with a given scale, as is and transposed, and the amax of tiles: one pass over the input.

The compiler would write the fp8 values once for the GEMM and once more for the transpose, and compute the
reciprocal of the scale for every element; its kernels ran at 2.4 to 3 TB/s on an H200.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.precision.fp8.quantise import encode

if find_spec("triton") is not None:  # comes with torch for CUDA
    from meshwright.precision.fp8.cast_experts_triton import cast_expert_tiles
    from meshwright.precision.fp8.cast_triton import cast_tiles

TILE = 128
"""Rows and columns of the tiles whose amax is returned."""


class Cast(NamedTuple):
    """x[M, K] in fp8, and its transpose."""

    values_MK: Tensor
    transposed_KM: Tensor
    tile_amax: Tensor
    """fp32 values whose maximum is the amax of x, inf where x holds a nan; empty if not asked for."""


def cast_transpose(
    parts: Sequence[Tensor], scale: Tensor, dtype: torch.dtype, *, with_amax: bool = False
) -> Cast:
    """Cast matrices that are concatenated by columns, as one matrix."""
    return Cast(*_cast_transpose(list(parts), scale, dtype, with_amax))


@torch.library.custom_op("meshwright::fp8_cast_transpose", mutates_args=())
def _cast_transpose(
    parts: list[Tensor],
    scale: Tensor,
    dtype: torch.dtype,
    with_amax: bool,  # noqa: FBT001 - an operator's schema
) -> tuple[Tensor, Tensor, Tensor]:
    cast, widths = _empty_cast(parts, scale, dtype, with_amax=with_amax), [part.shape[1] for part in parts]
    columns = cast.values_MK.split(widths, 1), cast.transposed_KM.split(widths)
    tiles = cast.tile_amax.split([_num_tiles(part) if with_amax else 0 for part in parts])
    for part, values, transposed, tile_amax in zip(parts, *columns, tiles, strict=True):
        cast_into(part, scale, values, transposed, tile_amax if with_amax else None)
    return cast


@_cast_transpose.register_fake
def _(
    parts: list[Tensor],
    scale: Tensor,
    dtype: torch.dtype,
    with_amax: bool,  # noqa: FBT001
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_cast(parts, scale, dtype, with_amax=with_amax)


@torch.library.custom_op("meshwright::fp8_deferred_cast_transpose", mutates_args=())
def deferred_cast_transpose(parts: list[Tensor], scale: Tensor, dtype: torch.dtype, after: Tensor) -> Tensor:
    """x^T in fp8 of parts concatenated by rows, not before `after` exists: see `deferred_transpose`."""
    del after
    transposed_KM = _empty_transposed(parts, dtype)
    for part, transposed in zip(parts, transposed_KM.split([len(part) for part in parts], 1), strict=True):
        cast_into(part, scale, torch.empty_like(part, dtype=dtype), transposed)
    return transposed_KM


@deferred_cast_transpose.register_fake
def _(parts: list[Tensor], scale: Tensor, dtype: torch.dtype, after: Tensor) -> Tensor:
    del scale, after
    return _empty_transposed(parts, dtype)


def _empty_transposed(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return parts[0].new_empty((parts[0].shape[1], sum(len(part) for part in parts)), dtype=dtype)


def cast_into(
    x_MK: Tensor, scale: Tensor, values_MK: Tensor, transposed_KM: Tensor, tile_amax: Tensor | None = None
) -> None:
    """Cast x into given tensors, which may be columns of larger matrices."""
    if x_MK.is_cuda and x_MK.dtype != torch.float64:
        cast_tiles(x_MK, scale, values_MK, transposed_KM, tile_amax)
        return
    values_MK.copy_(encode(x_MK, scale, values_MK.dtype, None).values_MK)
    transposed_KM.copy_(values_MK.t())
    if tile_amax is not None:
        tile_amax.copy_(x_MK.abs().amax().nan_to_num(torch.inf))


def cast_experts_into(
    weight_ENK: Tensor, scale_ERC: Tensor, values_ENK: Tensor, transposed_EKN: Tensor
) -> None:
    """Cast stacked weights with R x C scales per expert into given tensors: one scale, or one per TILE."""
    if weight_ENK.is_cuda and weight_ENK.dtype != torch.float64:
        cast_expert_tiles(weight_ENK, scale_ERC, values_ENK, transposed_EKN)
        return
    for weight, scale_RC, values in zip(weight_ENK, scale_ERC, values_ENK, strict=True):
        block = None if scale_RC.numel() == 1 else (TILE, TILE)
        scale = scale_RC.view(()) if block is None else scale_RC
        values.copy_(encode(weight, scale, values.dtype, block).values_MK)
    transposed_EKN.copy_(values_ENK.transpose(1, 2))


def _empty_cast(parts: Sequence[Tensor], scale: Tensor, dtype: torch.dtype, *, with_amax: bool) -> Cast:
    num_rows, num_columns = parts[0].shape[0], sum(part.shape[1] for part in parts)
    return Cast(
        parts[0].new_empty((num_rows, num_columns), dtype=dtype),
        parts[0].new_empty((num_columns, num_rows), dtype=dtype),
        scale.new_empty(sum(_num_tiles(part) for part in parts) if with_amax else 0),
    )


def _num_tiles(x_MK: Tensor) -> int:
    return -(-x_MK.shape[0] // TILE) * -(-x_MK.shape[1] // TILE)
