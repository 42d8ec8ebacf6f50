"""The cast to fp8, as is and transposed, plain and in Triton's interpreter."""

import math

import pytest
import torch
from tests.support.triton_interpreter import IS_INTERPRETED, needs_triton, printed_in_interpreter

from meshwright.precision.fp8.cast import _cast_transpose, cast_into, cast_transpose, deferred_cast_transpose
from meshwright.precision.fp8.quantise import encode
from meshwright.precision.fp8.recipes import E4M3, E5M2

SCALE = torch.tensor(2.0**-4)


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_parts_are_concatenated_by_columns(dtype: torch.dtype, source: torch.dtype) -> None:
    parts = [torch.randn(70, width).to(source) for width in (5, 130)]
    cast = cast_transpose(parts, SCALE, dtype, with_amax=True)
    expected = encode(torch.cat(parts, 1), SCALE, dtype, None).values_MK
    assert torch.equal(_bits(cast.values_MK), _bits(expected))
    assert cast.transposed_KM.is_contiguous() and torch.equal(_bits(cast.transposed_KM), _bits(expected.t()))
    assert cast.tile_amax.amax() == torch.cat(parts, 1).abs().amax().float()


def test_amax_hides_no_nan_and_is_empty_where_not_asked_for() -> None:
    x = torch.randn(6, 4)
    x[2, 3] = math.nan
    assert cast_transpose([x], SCALE, E4M3, with_amax=True).tile_amax.amax() == math.inf
    assert cast_transpose([x], SCALE, E4M3).tile_amax.numel() == 0


def test_deferred_cast_is_the_same_and_concatenated_by_rows() -> None:
    parts = [torch.randn(rows, 20) for rows in (3, 8)]
    expected = encode(torch.cat(parts), SCALE, E4M3, None).values_MK.t()
    assert torch.equal(_bits(deferred_cast_transpose(parts, SCALE, E4M3, torch.zeros(1))), _bits(expected))


def test_into_columns_of_a_larger_matrix() -> None:
    x, values, transposed = torch.randn(6, 4), torch.zeros(6, 9).to(E4M3), torch.zeros(9, 6).to(E4M3)
    cast_into(x, SCALE, values[:, 3:7], transposed[3:7])
    expected = encode(x, SCALE, E4M3, None).values_MK
    assert torch.equal(_bits(values[:, 3:7]), _bits(expected))
    assert torch.equal(_bits(transposed[3:7]), _bits(expected.t()))
    assert not values[:, :3].float().any() and not transposed[7:].float().any()


def test_tracing_knows_the_shapes() -> None:
    parts = [torch.randn(130, 5), torch.randn(130, 260)]
    torch.library.opcheck(_cast_transpose, (parts, SCALE, E5M2, True))
    torch.library.opcheck(deferred_cast_transpose, (parts[:1], SCALE, E5M2, torch.zeros(1)))


@needs_triton
def test_interpreted_tiles_equal_the_plain_cast() -> None:
    assert printed_in_interpreter(__name__) == ["float8_e4m3fn", "float8_e5m2"]


def compare(dtype: torch.dtype, source: torch.dtype) -> None:
    """Sizes that fill no tile; inputs and outputs are columns of larger matrices.

    All values are exact in the format: the interpreter does not round, saturate or keep nan as the hardware
    does. That is compared on the hardware.
    """
    from meshwright.precision.fp8.cast_triton import cast_tiles

    finite = torch.arange(256).to(torch.uint8).view(dtype).float()
    finite = finite[finite.isfinite() & (finite.abs() >= torch.finfo(dtype).smallest_normal)]
    x = (finite[torch.randint(len(finite), (200, 150))] * SCALE).to(source)[:, 7:143]
    x[0, 0] = math.nan
    values, transposed = torch.zeros(200, 300).to(dtype), torch.zeros(300, 200).to(dtype)
    tile_amax = torch.zeros(4)
    cast_tiles(x, SCALE, values[:, 100:236], transposed[100:236], tile_amax)
    expected = encode(x, SCALE, dtype, None).values_MK
    values[0, 100] = transposed[100, 0] = expected[0, 0]
    assert torch.equal(_bits(values[:, 100:236]), _bits(expected))
    assert torch.equal(_bits(transposed[100:236]), _bits(expected.t()))
    assert not values[:, :100].float().any() and not transposed[236:].float().any()
    assert tile_amax[0] == math.inf and tile_amax[3] == x[128:, 128:].abs().amax()
    print(str(dtype).removeprefix("torch."))


if __name__ == "__main__" and IS_INTERPRETED:
    compare(E4M3, torch.bfloat16)
    compare(E5M2, torch.float32)
