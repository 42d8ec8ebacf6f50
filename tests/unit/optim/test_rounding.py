"""fp32 numbers in 16 bits: exactly with the rest beside them, or right on average."""

import math
import struct

import pytest
import torch
from torch import Tensor

from meshwright.optim.rounding import bits_of, read, rounded, split, write
from meshwright.optim.rounding_noise import NOISE_LEVELS

EVERY_NOISE = torch.arange(NOISE_LEVELS, dtype=torch.int32)


def from_bits(*bits: int) -> Tensor:
    return torch.tensor([struct.unpack("<f", struct.pack("<I", one))[0] for one in bits])


# Both signs of: zero, the smallest denormals, a tie on each side of an even and an odd upper half, just off
# a tie, a carry into the exponent, the largest numbers (some of which are nearest to infinity), infinity.
MAGNITUDES = (
    *(0x00000000, 0x00000001, 0x00007FFF, 0x00008000, 0x00008001, 0x0000FFFF, 0x007FFFFF, 0x00800000),
    *(0x3F800000, 0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0x3F81FFFF, 0x3FFF8000, 0x3FFFFFFF),
    *(0x7F7F0000, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0x7F800000),
)
CORNERS = from_bits(*MAGNITUDES, *(one | 0x80000000 for one in MAGNITUDES))
SEED = torch.Generator().manual_seed(0)
RANDOM_BITS = torch.randint(-(2**31), 2**31, (200_000,), generator=SEED).to(torch.int32).view(torch.float32)
NUMBERS = torch.cat([CORNERS, RANDOM_BITS[~RANDOM_BITS.isnan()]])


def test_halves_give_the_number_back_bit_by_bit():
    upper, lower = split(NUMBERS)
    assert upper.dtype == lower.dtype == torch.int16
    assert torch.equal(read(upper, lower).view(torch.int32), NUMBERS.view(torch.int32))


def test_the_upper_half_is_the_nearest_bf16_number():
    """torch rounds ties to even, this away from zero: elsewhere they agree."""
    upper, lower = split(NUMBERS)
    nearest = NUMBERS.bfloat16()
    ours = upper.view(torch.bfloat16)
    is_tie = lower == -(2**15)
    assert is_tie.sum() > 4
    assert torch.equal(ours[~is_tie].view(torch.int16), nearest[~is_tie].view(torch.int16))
    ties = NUMBERS[is_tie & nearest.isfinite() & ours.isfinite()].double()
    away = ours[is_tie & nearest.isfinite() & ours.isfinite()].double()
    assert (away.abs() > ties.abs()).all()


@pytest.mark.parametrize("bits", (0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0xFFC00001, 0x7F800001))
def test_not_a_number_stays_so(bits):
    value = from_bits(0).view(torch.int32) + (bits - 2**32 if bits >= 2**31 else bits)
    value = value.to(torch.int32).view(torch.float32)
    assert value.isnan().all()
    upper, lower = split(value)
    assert upper.view(torch.bfloat16).isnan().all() and read(upper, lower).isnan().all()
    assert rounded(value, torch.tensor([65535])).view(torch.bfloat16).isnan().all()


@pytest.mark.parametrize("value", (1.001, -1.001, 3e-39, -0.1, 1.99999, 7e37))
def test_stochastic_rounding_is_unbiased(value):
    """Over all noise levels the mean is the number itself, to the last bit of fp32."""
    fp32 = torch.full((NOISE_LEVELS,), value)
    numbers = rounded(fp32, EVERY_NOISE).view(torch.bfloat16)
    assert len(numbers.unique()) == 2
    assert numbers.double().mean().item() == pytest.approx(float(fp32[0]), rel=1e-12)


@pytest.mark.parametrize("noise", (0, 1, 65535))
def test_stochastic_rounding_keeps_bf16_values_and_infinities(noise):
    representable = NUMBERS.bfloat16()
    second = rounded(representable.float(), torch.tensor(noise))
    assert torch.equal(second, representable.view(torch.int16))
    largest = torch.tensor([3.4028e38, -3.4028e38])
    assert rounded(largest, torch.tensor(noise)).view(torch.bfloat16).isfinite().all()


def test_small_updates_count_on_average():
    """Nearest rounding would leave 1 where it is; 4096 steps of 2^-12 must add up to about 1."""
    weight = torch.ones(256, dtype=torch.bfloat16)
    noise = torch.randint(0, NOISE_LEVELS, (4096, 256), generator=SEED, dtype=torch.int32)
    for drawn in noise:
        write(weight.float() + 2.0**-12, bits_of(weight), None, drawn)
    # Each step moves by 2^-7 with probability 2^-5: sigma of the sum is sqrt(4096 x 2^-5) x 2^-7 = 0.09, and
    # less where bf16 values are denser; of the mean over 256 weights 0.006.
    assert math.isclose(weight.double().mean().item(), 2.0, abs_tol=0.025)
