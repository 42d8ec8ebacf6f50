"""fp8 matmuls of frozen weights: the same outputs and input gradients, and no weight gradient."""

import pytest
import torch

from meshwright.precision.fp8.linear import Fp8Matmul


@pytest.mark.parametrize("recipe", ["current", "blockwise", "mxfp8"])
def test_frozen_weights_give_the_same_input_gradient(recipe: str) -> None:
    found = []
    for is_trained in (True, False):
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(128, 256, generator=generator, requires_grad=True)
        weights = [
            torch.nn.Parameter(torch.randn(128, 256, generator=generator), requires_grad=is_trained)
            for _ in range(2)
        ]
        matmul = Fp8Matmul(recipe, dtype=torch.float32, native=False)
        ys = matmul.fused(x, weights)
        sum(((y * (index + 1)).sin().sum() for index, y in enumerate(ys)), torch.zeros(())).backward()
        found.append([*(y.detach() for y in ys), x.grad])
        assert all((weight.grad is not None) == is_trained for weight in weights)
    for trained, frozen in zip(*found, strict=True):
        assert torch.equal(trained, frozen)
