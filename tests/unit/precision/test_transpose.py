"""A transposed copy, plain and in Triton's interpreter."""

import pytest
import torch
from tests.support.triton_interpreter import IS_INTERPRETED, needs_triton, printed_in_interpreter

from meshwright.precision.fp8.transpose import transpose


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float64])
def test_a_transpose_is_contiguous_and_keeps_its_bits(dtype: torch.dtype) -> None:
    x_MK = torch.randn(6, 5).to(dtype)
    found = transpose(x_MK)
    assert found.is_contiguous() and found.dtype == dtype
    assert torch.equal(found.double(), x_MK.t().double())


def test_tracing_knows_its_shape() -> None:
    torch.library.opcheck(transpose, (torch.randn(6, 5),))


@needs_triton
def test_interpreted_tiles_equal_the_plain_copy() -> None:
    assert printed_in_interpreter(__name__) == ["float8_e4m3fn", "bfloat16"]


def compare(dtype: torch.dtype) -> None:
    """Sizes that fill no tile."""
    from meshwright.precision.fp8.transpose_triton import transpose_tiles

    x_MK = torch.randn(200, 136).to(dtype)
    found = transpose_tiles(x_MK)
    assert found.shape == (136, 200) and torch.equal(found.float(), x_MK.t().float())
    print(str(dtype).removeprefix("torch."))


if __name__ == "__main__" and IS_INTERPRETED:
    compare(torch.float8_e4m3fn)
    compare(torch.bfloat16)
