"""The grouped matmul with scales of 128-blocks, in Triton's interpreter, against the dequantised operands."""

import torch
from tests.support.triton_interpreter import IS_INTERPRETED, needs_triton, printed_in_interpreter

from meshwright.precision.fp8.expert_weights import (
    QuantisedExperts,
    decode_experts,
    encode_experts,
    expert_scales,
)
from meshwright.precision.fp8.quantise import decode, quantise
from meshwright.precision.fp8.recipes import E4M3, RECIPES

RULE = RECIPES["blockwise"]
COUNTS = {"ragged": [130, 0, 1, 200], "one": [5], "last-empty": [128, 128, 0]}


@needs_triton
def test_the_interpreted_kernels_equal_plain_torch() -> None:
    assert printed_in_interpreter("tests.unit.precision.test_grouped_triton") == [*COUNTS, "cast", "cast"]


def compare(name: str, counts: list[int]) -> None:
    """Every row of every expert, and no row beside them."""
    from meshwright.precision.fp8.grouped_triton import grouped_block_kernel

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(counts), 384, generator=generator) * 100
    weight = torch.randn(len(counts), 256, 384, generator=generator)
    a, b = quantise(x, E4M3, RULE.token_block), encode_experts(weight, expert_scales(weight, RULE), RULE)
    y = torch.full((len(x) + 1, 256), 7.0)
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    grouped_block_kernel(a.values_MK, b.values_ENK, a.scale.t().contiguous(), b.scale_ERC, ends, y[:-1])
    weights = decode_experts(b, torch.float32)
    rows = decode(a, torch.float32).split(counts)
    expected = torch.cat([part @ each.T for part, each in zip(rows, weights, strict=True)])
    assert (y[-1] == 7.0).all()
    torch.testing.assert_close(y[:-1], expected, rtol=1e-4, atol=1e-2)
    print(name)


def compare_cast(recipe: str) -> None:
    """Values that the format has exactly: the interpreter does not round as the hardware does."""
    from meshwright.precision.fp8.cast_experts_triton import cast_expert_tiles

    rule = RECIPES[recipe]
    finite = torch.arange(256).to(torch.uint8).view(E4M3).float()
    finite = finite[finite.isfinite() & (finite.abs() >= 2.0**-6)]
    scale = torch.exp2(torch.arange(3.0))[:, None, None].expand(
        3, *((1, 1) if recipe == "current" else (2, 1))
    )
    values = finite[torch.randint(len(finite), (3, 256, 128))]
    weight = decode_experts(QuantisedExperts(values, scale), torch.float32)
    found, transposed = torch.zeros(3, 256, 128).to(E4M3), torch.zeros(3, 128, 256).to(E4M3)
    cast_expert_tiles(weight, scale.contiguous(), found, transposed)
    expected = encode_experts(weight, scale, rule).values_ENK
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(transposed.float(), expected.float().transpose(1, 2))
    print("cast")


if __name__ == "__main__" and IS_INTERPRETED:
    for case, sizes in COUNTS.items():
        compare(case, sizes)
    compare_cast("current")
    compare_cast("blockwise")
