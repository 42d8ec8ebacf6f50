"""Functions of two frozen matrices in graphs that need no gradient, as in evaluation."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from meshwright.models.layers.adapted_fp8 import stored_adapted_linear, stored_adapted_swiglu
from meshwright.ops.adapted_linear import adapted_linear
from meshwright.ops.fused_linear import fused_linear
from meshwright.precision.fp8.linear import NO_AMAX_GROUPS
from meshwright.precision.fp8.stored import Fp8Scale, StoredFp8Matmul, encode_stored

WIDTH, RANK = 16, 4
BF16 = torch.bfloat16


def _normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


X = _normal(8, WIDTH, seed=0).to(BF16)
WEIGHTS = [_normal(32, WIDTH, seed=seed).to(BF16) for seed in (1, 2)]
TRAINED = [weight.clone().requires_grad_() for weight in WEIGHTS]
FACTORS = [
    (_normal(RANK, WIDTH, seed=seed).requires_grad_(), _normal(32, RANK, seed=seed + 1).requires_grad_())
    for seed in (3, 5)
]


def _stored() -> tuple[StoredFp8Matmul, list[Tensor]]:
    scale = Fp8Scale().to_empty(device="cpu")
    scale.value.fill_(2.0**-6)
    matmul = StoredFp8Matmul(scale, dtype=BF16, native=False, amax_groups=NO_AMAX_GROUPS)
    return matmul, [encode_stored(weight, scale.value) for weight in WEIGHTS]


def _of_stored(function: Callable[..., Tensor]) -> Callable[[], Tensor]:
    matmul, stored = _stored()
    return lambda: function(matmul, X, stored, FACTORS)


def _fused_bytes() -> Callable[[], Tensor]:
    matmul, stored = _stored()
    return lambda: torch.cat(matmul.fused(X, stored), dim=-1)


FUNCTIONS = {
    "frozen": lambda: fused_linear(X, WEIGHTS, BF16),
    "trained": lambda: fused_linear(X, TRAINED, BF16),
    "adapted": lambda: adapted_linear(X, WEIGHTS, FACTORS, BF16),
    "stored in fp8": _fused_bytes(),
    "stored in fp8, adapted": _of_stored(stored_adapted_linear),
    "stored in fp8, adapted, activated": _of_stored(stored_adapted_swiglu),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_they_compile_where_nothing_needs_a_gradient(name: str) -> None:
    function = FUNCTIONS[name]
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(function, fullgraph=True, backend="eager")
        assert torch.equal(compiled(), function())
