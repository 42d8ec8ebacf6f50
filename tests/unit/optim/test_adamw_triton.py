"""The kernel of AdamW's pass, in Triton's interpreter, against plain torch."""

from itertools import product
from typing import NamedTuple

import torch
from tests.support.triton_interpreter import IS_INTERPRETED, needs_triton, printed_in_interpreter
from torch import Tensor

from meshwright.optim.adamw import adamw_pass
from meshwright.optim.full_parameter import unsharded
from meshwright.optim.fused import AdamScalars
from meshwright.optim.rounding import bits_of, read
from meshwright.optim.rounding_noise import noise_grid, step_key

CPU = torch.device("cpu")
WEIGHTS, MOMENTS = ("exact", "stochastic", "fp32"), (torch.float32, torch.bfloat16)
# Two of a program's parts and some columns more.
SHAPE = (3, 2500)


@needs_triton
def test_the_interpreted_kernel_equals_the_plain_pass() -> None:
    kinds = [f"{weight}/{moment}" for weight, moment in product(WEIGHTS, MOMENTS)]
    assert printed_in_interpreter("tests.unit.optim.test_adamw_triton") == kinds


class Stored(NamedTuple):
    weight: Tensor
    lower: Tensor | None
    gradient: Tensor
    first: Tensor
    second: Tensor


def _tensors(weight: str, moment: torch.dtype) -> Stored:
    """Some elements are nan or infinite."""
    generator = torch.Generator().manual_seed(1)
    value, gradient, first, second = (torch.randn(SHAPE, generator=generator) for _ in range(4))
    gradient[0, 0], gradient[1, 7], first[2, 3] = float("inf"), float("nan"), 3.4e38
    stored = value if weight == "fp32" else bits_of(value.bfloat16())
    lower = torch.randint(-(2**15), 2**15, SHAPE, dtype=torch.int16, generator=generator)
    moments = (bits_of(one.to(moment)) for one in (first, second.square()))
    return Stored(stored, lower if weight == "exact" else None, gradient.bfloat16(), *moments)


def compare(weight: str, moment: torch.dtype) -> None:
    """Two steps of each, the second without a factor."""
    from meshwright.optim.adamw_triton import adamw_kernel

    grid = noise_grid(unsharded("w", torch.empty(SHAPE)), CPU)
    plain, own = _tensors(weight, moment), _tensors(weight, moment)
    for step, factor in enumerate((torch.tensor(0.3, dtype=torch.float64), 1.0)):
        scalars = AdamScalars(0.999, 1e-2, 0.8, 0.1, 0.95, 0.05, 1e-8, factor)
        adamw_pass(*plain, scalars, grid, step_key(step, CPU))
        adamw_kernel(*own, scalars, grid, step_key(step, CPU))
    # A last bit of fp32 tips a rounding to bf16 now and then.
    tipped = {"exact": 0.0, "fp32": 0.0, "stochastic": 1e-3}[weight]
    _near(read(own.weight, own.lower), read(plain.weight, plain.lower), tipped)
    for found, expected in ((own.first, plain.first), (own.second, plain.second)):
        _near(read(found), read(expected), 0.0 if moment == torch.float32 else 1e-3)
    print(f"{weight}/{moment}")


def _near(found: Tensor, expected: Tensor, tipped: float) -> None:
    assert torch.equal(found.isfinite(), expected.isfinite())
    away = (found - expected).abs() > 1e-5 * (1e-3 + expected.abs())
    assert away.double().mean() <= tipped


if __name__ == "__main__" and IS_INTERPRETED:
    for kind in product(WEIGHTS, MOMENTS):
        compare(*kind)
