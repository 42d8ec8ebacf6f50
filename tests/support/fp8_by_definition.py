"""E4M3 by its definition: a frozen base in fp8 as the oracle rounds it.

Every matrix of a routed expert has a scale of its own.

One sign bit, four bits of exponent (bias 7), three of mantissa, no infinities; the largest number is 448. A
group of linears that share their input has one scale, the smallest power of two that fits its amax.
"""

import math

import torch
from torch import Tensor, nn

LARGEST = 448.0
# MLA's projections to a latent stay in full: tp does not shard them.
_SHARED_INPUT = (("query", "key", "value"), ("gate", "up"), ("output",), ("down",), ("query_up",), ("kv_up",))


def e4m3_value(byte: int) -> float:
    """The number that a byte stands for; nan for 0x7f and 0xff."""
    sign, exponent, mantissa = -1.0 if byte & 0x80 else 1.0, (byte >> 3) & 15, byte & 7
    if (exponent, mantissa) == (15, 7):
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


def scale_of(weights: list[Tensor]) -> float:
    """The smallest power of two with which the largest magnitude fits the format."""
    amax = max(float(one.abs().max()) for one in weights)
    return 2.0 ** math.ceil(math.log2(amax / LARGEST))


def to_bytes(weight: Tensor, scale: float) -> Tensor:
    """The nearest number of the format, as bytes; a tie goes to the even mantissa."""
    values = torch.tensor([e4m3_value(byte) for byte in range(0x7F)], dtype=torch.float64)
    magnitude = weight.double().abs() / scale
    above = torch.searchsorted(values, magnitude).clamp(max=len(values) - 1)
    below = (above - 1).clamp(min=0)
    to_above, to_below = values[above] - magnitude, magnitude - values[below]
    takes_above = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    return torch.where(takes_above, above, below).to(torch.uint8) + 128 * (weight < 0).to(torch.uint8)


def from_bytes(stored: Tensor, scale: float) -> Tensor:
    """The weights that bytes stand for, in float64."""
    values = torch.tensor([e4m3_value(byte) for byte in range(256)], dtype=torch.float64)
    return values[stored.long()] * scale


def groups_of(names: list[str]) -> list[list[str]]:
    """The linears of the blocks that share an input, by name."""
    blocks = sorted({name.rsplit(".", 2)[0] for name in names if name.startswith("blocks.")})
    found = [[f"{block}.{own}.weight" for own in group] for block in blocks for group in _SHARED_INPUT]
    kept = [[name for name in group if name in names] for group in found]
    return [group for group in kept if group]


@torch.no_grad()
def round_base(model: nn.Module) -> None:
    """Replace the linears of a float64 model by what a base in fp8 stores of them."""
    named = dict(model.named_parameters())
    for group in groups_of(list(named)):
        scale = scale_of([named[name] for name in group])
        for name in group:
            named[name].copy_(from_bytes(to_bytes(named[name], scale), scale))
    for name in (one for one in named if ".experts." in one):
        for matrix in named[name]:
            matrix.copy_(from_bytes(to_bytes(matrix, scale_of([matrix])), scale_of([matrix])))
