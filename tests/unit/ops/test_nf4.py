"""NF4 against bitsandbytes, byte for byte, and its kernel in Triton's interpreter."""

import pytest
import torch
from tests.support.triton_interpreter import IS_INTERPRETED, needs_triton, printed_in_interpreter

from meshwright.ops.adapted_linear import adapted_linear
from meshwright.ops.nf4 import concatenated_nf4, dequantise_nf4, quantise_nf4
from meshwright.ops.nf4_grouped import Nf4Experts
from meshwright.ops.nf4_nested import NestedPlace, nest_absmax, unnest_absmax


def weights() -> torch.Tensor:
    """Weights of several sizes, a block of zeros, and a block of one value."""
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(96, 256, generator=generator) * torch.logspace(-3, 1, 96)[:, None]
    weight[5, 64:128] = 0.0
    weight[7, :64] = 0.25
    return weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_bytes_are_those_of_bitsandbytes(dtype: torch.dtype) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = weights().to(dtype)
    theirs, state = functional.quantize_4bit(
        weight, blocksize=64, quant_type="nf4", quant_storage=torch.uint8
    )
    packed, absmax = quantise_nf4(weight)
    is_zero = (weight.float().unflatten(-1, (-1, 64)).abs().amax(-1) == 0).flatten()
    ours_blocks, theirs_blocks = packed.reshape(-1, 32), theirs.reshape(-1, 32)
    assert torch.equal(ours_blocks[~is_zero], theirs_blocks[~is_zero])
    assert torch.equal(absmax.view(torch.float32).flatten(), state.absmax)
    back = functional.dequantize_4bit(theirs, state)
    assert torch.equal(dequantise_nf4(packed, absmax, dtype), back)


def test_a_shard_is_quantised_by_itself() -> None:
    """Rows, and columns in multiples of a block: what ZeRO-3 and tp hold."""
    weight = weights()
    packed, absmax = quantise_nf4(weight)
    rows, columns = slice(10, 37), slice(64, 192)
    part, part_absmax = quantise_nf4(weight[rows, columns])
    assert torch.equal(part, packed[rows, 32:96])
    assert torch.equal(part_absmax, absmax[rows, 1:3])


@pytest.mark.parametrize("shape", [(96, 256), (100, 1344), (512, 1024)])
def test_nested_absmax_is_that_of_bitsandbytes(shape: tuple[int, int]) -> None:
    """Its CPU kernel looks numbers up in steps of 2^-15, so codes may differ next to a threshold."""
    functional = pytest.importorskip("bitsandbytes.functional")
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(shape, generator=generator) * torch.logspace(-3, 1, shape[0])[:, None]
    _, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=True)
    _, absmax = quantise_nf4(weight)
    codes, table = nest_absmax(absmax.view(torch.float32))
    offset, values, nested = table[0], table[1:257], table[257:]
    assert torch.equal(values, functional.create_dynamic_map())
    assert torch.equal(offset, state.offset) and torch.equal(nested, state.state2.absmax)
    flat = absmax.view(torch.float32).flatten() - offset
    scaled = flat / nested.repeat_interleave(256)[: len(flat)]
    thresholds = (values[1:] + values[:-1]) / 2
    is_next = (scaled[:, None] - thresholds).abs().amin(1) < 2**-15
    theirs = state.absmax.flatten()
    assert torch.equal(codes.flatten()[~is_next], theirs[~is_next])
    assert (codes.flatten() != theirs).float().mean() < 2e-3
    place = NestedPlace(0, 0, codes.shape[1])
    expected = functional.dequantize_blockwise(theirs, state.state2) + state.offset
    assert torch.equal(unnest_absmax(theirs.view_as(codes), table, place).flatten(), expected)


def test_a_shard_reads_the_table_of_its_matrix() -> None:
    _, absmax = quantise_nf4(torch.randn(100, 1344, generator=torch.Generator().manual_seed(1)))
    codes, table = nest_absmax(absmax.view(torch.float32))
    full = unnest_absmax(codes, table, NestedPlace(0, 0, 21))
    part = unnest_absmax(codes[37:61, 5:12], table, NestedPlace(37, 5, 21))
    assert torch.equal(part, full[37:61, 5:12])


@pytest.mark.parametrize("shape", [(4, 64, 128), (3, 100, 1344)])
def test_nested_experts_are_those_of_bitsandbytes(shape: tuple[int, int, int]) -> None:
    """Each expert by itself: its bytes, its offset, its scales, and the weights that they stand for.

    As above codes may differ next to a threshold, so the last are compared for the codes of bitsandbytes.
    """
    functional = pytest.importorskip("bitsandbytes.functional")
    sizes = torch.logspace(-1, 1, shape[0] * shape[1]).view(shape[0], shape[1], 1)
    weight_EFD = torch.randn(shape, generator=torch.Generator().manual_seed(5)) * sizes
    packed, bits = quantise_nf4(weight_EFD)
    codes, table = nest_absmax(bits.view(torch.float32))
    offsets, _, nested = table.split([len(codes), 256, len(table) - len(codes) - 256])
    theirs = [
        functional.quantize_4bit(one, blocksize=64, quant_type="nf4", compress_statistics=True)
        for one in weight_EFD
    ]
    their_codes = torch.stack([state.absmax.view_as(codes[0]) for _, state in theirs])
    assert torch.equal(packed.flatten(1), torch.stack([one.flatten() for one, _ in theirs]))
    assert torch.equal(offsets, torch.stack([state.offset for _, state in theirs]))
    assert torch.equal(nested, torch.cat([state.state2.absmax for _, state in theirs]))
    assert (codes != their_codes).float().mean() < 2e-3
    place = NestedPlace(0, 0, codes.shape[-1], 0, len(codes))
    found = Nf4Experts(packed, their_codes, table, place).dequantised(torch.float32)
    for ours, (bytes_, state) in zip(found, theirs, strict=True):
        assert torch.equal(ours, functional.dequantize_4bit(bytes_, state))


def test_experts_of_a_shard_read_their_part_of_the_table() -> None:
    """What ep, etp and ZeRO-3 hold: some of the experts, rows and columns."""
    generator = torch.Generator().manual_seed(1)
    _, bits = quantise_nf4(torch.randn(6, 100, 1344, generator=generator))
    absmax = bits.view(torch.float32)
    codes, table = nest_absmax(absmax)
    full = unnest_absmax(codes, table, NestedPlace(0, 0, 21, 0, 6))
    part = unnest_absmax(codes[2:4, 37:61, 5:12], table, NestedPlace(37, 5, 21, 2, 6))
    assert torch.equal(part, full[2:4, 37:61, 5:12])
    of_two, own_table = nest_absmax(absmax[2:4])
    assert torch.equal(of_two, codes[2:4])
    assert torch.equal(unnest_absmax(of_two, own_table, NestedPlace(0, 0, 21, 0, 2)), full[2:4])
    alone = nest_absmax(absmax[3])
    assert torch.equal(unnest_absmax(*alone, NestedPlace(0, 0, 21)), full[3])


def test_fused_matrices_of_nested_nf4_read_their_own_tables() -> None:
    """Several tables of several blocks: the place of one is not taken for that of another."""
    parts = [torch.randn(320, 64, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    packed, bits = zip(*map(quantise_nf4, parts), strict=True)
    codes, tables = zip(*(nest_absmax(one.view(torch.float32)) for one in bits), strict=True)
    place = NestedPlace(0, 0, 1)
    absmax = [unnest_absmax(*one, place).view(torch.int32) for one in zip(codes, tables, strict=True)]
    x_TK, nested = torch.eye(64, dtype=torch.float64), [(table, place) for table in tables]
    found = adapted_linear(x_TK, packed, [None] * 3, torch.float64, absmax=codes, nested=nested)
    assert torch.equal(found, concatenated_nf4(packed, absmax, torch.float64).mT)


def test_several_matrices_share_one_buffer() -> None:
    parts = weights().split((32, 64))
    packed, absmax = zip(*map(quantise_nf4, parts), strict=True)
    found = concatenated_nf4(packed, absmax, torch.float64)
    assert torch.equal(found, dequantise_nf4(*quantise_nf4(weights()), torch.float64))


@needs_triton
def test_the_kernel_equals_the_definition() -> None:
    """In fp32: the interpreter's casts to 16 bits are not those of a GPU."""
    assert printed_in_interpreter("tests.unit.ops.test_nf4") == ["float32"]


if IS_INTERPRETED and __name__ == "__main__":
    from meshwright.ops.nf4_triton import dequantise_into

    quantised, scales = quantise_nf4(weights())
    out = torch.empty(96, 256)
    dequantise_into(quantised, scales.view(torch.float32), out)
    assert torch.equal(out, dequantise_nf4(quantised, scales, torch.float32))
    print("float32")
