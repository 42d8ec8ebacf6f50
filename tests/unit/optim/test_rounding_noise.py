"""Rounding noise: uniform, and a part of it is that of the part."""

import pytest
import torch

from meshwright.optim.full_parameter import FullParameter
from meshwright.optim.rounding_noise import NOISE_LEVELS, Noise, draw, noise_grid, step_key

CPU = torch.device("cpu")
SHARDS = {
    "rows": ((6, 700), (slice(2, 5), slice(0, 700))),
    "columns": ((6, 700), (slice(0, 6), slice(130, 700))),
    "both": ((6, 700), (slice(3, 4), slice(300, 420))),
    "nothing": ((6, 700), (slice(6, 6), slice(0, 700))),
    "experts": ((4, 5, 30), (slice(1, 3), slice(2, 5), slice(4, 20))),
    "vector": ((700,), (slice(13, 99),)),
}


def noise_of(
    name: str, shape: tuple[int, ...], slices: tuple[slice, ...] | None = None, step: int = 3
) -> Noise:
    held = slices or tuple(slice(0, size) for size in shape)
    full = FullParameter(name, torch.Size(shape), held, (), lambda tensor: tensor)
    lengths = [part.stop - part.start for part in held]
    drawn = draw(noise_grid(full, CPU), step_key(step, CPU))
    return Noise(*(one.reshape(lengths) for one in drawn))


@pytest.mark.parametrize("shard", SHARDS)
def test_noise_of_a_shard_is_a_slice_of_the_noise(shard):
    shape, slices = SHARDS[shard]
    for part, full in zip(noise_of("w", shape, slices), noise_of("w", shape), strict=True):
        assert torch.equal(part, full[slices])


def test_noise_is_uniform_and_differs_by_name_step_and_use():
    drawn = noise_of("w", (300, 1000), step=1)
    # 300,000 draws: the standard error of a share of 0.1 is 0.00055, of a correlation 0.0018.
    for one in drawn:
        assert one.min() >= 0 and one.max() < NOISE_LEVELS
        shares = torch.histc(one.float(), bins=10, min=0, max=NOISE_LEVELS) / one.numel()
        assert (shares - 0.1).abs().max() < 0.003
    others = [noise_of("w", (300, 1000), step=2).weight, noise_of("u", (300, 1000), step=1).weight]
    weight = drawn.weight
    for other in (*others, drawn.first, drawn.second, weight.roll(1, 0), weight.roll(1, 1)):
        assert torch.corrcoef(torch.stack([weight.flatten(), other.flatten()]).float())[0, 1].abs() < 0.01
