"""Numbers in fp8 as they lie and turned, plain and in Triton's interpreter."""

import math

import pytest
import torch
from tests.support.triton_interpreter import IS_INTERPRETED, needs_triton, printed_in_interpreter

from meshwright.precision.fp8.cast import _cast_and_turn, cast_and_turn, turned_cast_late, write_cast
from meshwright.precision.fp8.quantise import encode
from meshwright.precision.fp8.recipes import E4M3, E5M2

UNIT = torch.tensor(2.0**-4)


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_parts_stand_side_by_side(dtype: torch.dtype, source: torch.dtype) -> None:
    parts = [torch.randn(70, width).to(source) for width in (5, 130)]
    cast = cast_and_turn(parts, UNIT, dtype, noting=True)
    expected = encode(torch.cat(parts, 1), UNIT, dtype, None).values_MK
    assert torch.equal(_bits(cast.values_MK), _bits(expected))
    assert cast.turned_KM.is_contiguous() and torch.equal(_bits(cast.turned_KM), _bits(expected.t()))
    assert cast.largest.amax() == torch.cat(parts, 1).abs().amax().float()


def test_magnitudes_hide_no_nan_and_are_none_where_not_asked_for() -> None:
    x = torch.randn(6, 4)
    x[2, 3] = math.nan
    assert cast_and_turn([x], UNIT, E4M3, noting=True).largest.amax() == math.inf
    assert cast_and_turn([x], UNIT, E4M3).largest.numel() == 0


def test_late_is_the_same_and_stands_one_below_the_other() -> None:
    parts = [torch.randn(rows, 20) for rows in (3, 8)]
    expected = encode(torch.cat(parts), UNIT, E4M3, None).values_MK.t()
    assert torch.equal(_bits(turned_cast_late(parts, UNIT, E4M3, torch.zeros(1))), _bits(expected))


def test_into_columns_of_a_wider_matrix() -> None:
    x, values, turned = torch.randn(6, 4), torch.zeros(6, 9).to(E4M3), torch.zeros(9, 6).to(E4M3)
    write_cast(x, UNIT, values[:, 3:7], turned[3:7])
    expected = encode(x, UNIT, E4M3, None).values_MK
    assert torch.equal(_bits(values[:, 3:7]), _bits(expected))
    assert torch.equal(_bits(turned[3:7]), _bits(expected.t()))
    assert not values[:, :3].float().any() and not turned[7:].float().any()


def test_tracing_knows_the_shapes() -> None:
    parts = [torch.randn(130, 5), torch.randn(130, 260)]
    torch.library.opcheck(_cast_and_turn, (parts, UNIT, E5M2, True))
    torch.library.opcheck(turned_cast_late, (parts[:1], UNIT, E5M2, torch.zeros(1)))


@needs_triton
def test_interpreted_tiles_equal_the_plain_cast() -> None:
    assert printed_in_interpreter(__name__) == ["float8_e4m3fn", "float8_e5m2"]


def compare(dtype: torch.dtype, source: torch.dtype) -> None:
    """Of sizes that fill no tile, out of and into columns of wider matrices.

    Of numbers that the format holds: the interpreter does not round, saturate or keep what is not a number as
    the hardware does; that is compared on the hardware.
    """
    from meshwright.precision.fp8.cast_triton import cast_tiles

    finite = torch.arange(256).to(torch.uint8).view(dtype).float()
    finite = finite[finite.isfinite() & (finite.abs() >= torch.finfo(dtype).smallest_normal)]
    x = (finite[torch.randint(len(finite), (200, 150))] * UNIT).to(source)[:, 7:143]
    x[0, 0] = math.nan
    values, turned = torch.zeros(200, 300).to(dtype), torch.zeros(300, 200).to(dtype)
    largest = torch.zeros(4)
    cast_tiles(x, UNIT, values[:, 100:236], turned[100:236], largest)
    expected = encode(x, UNIT, dtype, None).values_MK
    values[0, 100] = turned[100, 0] = expected[0, 0]
    assert torch.equal(_bits(values[:, 100:236]), _bits(expected))
    assert torch.equal(_bits(turned[100:236]), _bits(expected.t()))
    assert not values[:, :100].float().any() and not turned[236:].float().any()
    assert largest[0] == math.inf and largest[3] == x[128:, 128:].abs().amax()
    print(str(dtype).removeprefix("torch."))


if __name__ == "__main__" and IS_INTERPRETED:
    compare(E4M3, torch.bfloat16)
    compare(E5M2, torch.float32)
