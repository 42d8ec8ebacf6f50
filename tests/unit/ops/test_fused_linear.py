"""Several matrices on one input as one matmul: the same result as separate matmuls."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.ops.fused_linear import (
    accumulate_wgrad,
    concatenated,
    fused_dgrad,
    fused_linear,
    fused_matmul,
    is_packed,
    pack_weights,
)


def _matrices(dtype: torch.dtype = torch.float64) -> tuple[Tensor, list[nn.Parameter]]:
    generator = torch.Generator().manual_seed(0)
    x_BSK = torch.randn(2, 5, 6, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    shapes = ((4, 6), (2, 6), (3, 6))
    return x_BSK, [
        nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
        for shape in shapes
    ]


@pytest.mark.parametrize("packed", [True, False])
def test_one_matmul_equals_separate_ones(packed: bool) -> None:
    x_BSK, weights = _matrices()
    separate = torch.cat([functional.linear(x_BSK, weight) for weight in weights], dim=-1)
    wanted = torch.autograd.grad(separate.square().sum(), (x_BSK, *weights))
    if packed:
        pack_weights(weights)
    assert is_packed(weights) == packed
    fused = fused_linear(x_BSK, weights, torch.float64)
    torch.testing.assert_close(fused, separate, rtol=1e-13, atol=0)
    for grad, true in zip(torch.autograd.grad(fused.square().sum(), (x_BSK, *weights)), wanted, strict=True):
        torch.testing.assert_close(grad, true, rtol=1e-12, atol=1e-13)  # dx sums in another order


def test_packed_matrices_are_not_copied_and_change_together() -> None:
    _, weights = _matrices()
    pack_weights(weights)
    concatenation = concatenated(weights, torch.float64)
    assert concatenation.data_ptr() == weights[0].data_ptr()
    with torch.no_grad():
        weights[2].fill_(7.0)
    assert (concatenation[6:] == 7.0).all() and not (concatenation[:6] == 7.0).any()
    assert concatenated(weights, torch.float32).data_ptr() != weights[0].data_ptr()


def test_matrices_that_are_no_longer_packed_are_still_multiplied_right() -> None:
    x_BSK, weights = _matrices()
    pack_weights(weights)
    weights[1].data = weights[1].data.clone() + 1.0
    separate = torch.cat([functional.linear(x_BSK, weight) for weight in weights], dim=-1)
    torch.testing.assert_close(fused_linear(x_BSK, weights, torch.float64), separate, rtol=1e-13, atol=0)


def test_fp32_weights_are_cast_and_get_fp32_gradients() -> None:
    x_BSK, weights = _matrices(torch.float32)
    fused_linear(x_BSK, weights, torch.bfloat16).sum().backward()
    low = fused_linear(x_BSK.bfloat16(), [weight.bfloat16() for weight in weights], torch.bfloat16)
    assert torch.equal(fused_linear(x_BSK, weights, torch.bfloat16), low)
    assert [weight.grad.dtype for weight in weights] == [torch.float32] * 3  # pyright: ignore[reportOptionalMemberAccess]


@pytest.mark.parametrize("are_one", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gradients_are_added_to_the_buffers(are_one: bool, dtype: torch.dtype) -> None:
    x_BSK, weights = _matrices(dtype)
    fused_linear(x_BSK, weights, dtype).square().sum().backward()
    wanted = [x_BSK.grad, *(weight.grad.double() + 1.0 for weight in weights)]  # pyright: ignore[reportOptionalMemberAccess]
    concatenation = torch.ones(sum(map(len, weights)), x_BSK.shape[-1], dtype=torch.float64)
    sums = concatenation.split([len(weight) for weight in weights])
    x_BSK.grad = None
    for weight in weights:
        weight.grad = None
    grad_buffers = [concatenation] if are_one else [part.clone() for part in sums]
    fused_linear(x_BSK, weights, dtype, grad_buffers).square().sum().backward()
    assert [weight.grad for weight in weights] == [None] * 3
    rounding = 4 * torch.finfo(dtype).eps
    for seen, true in zip([x_BSK.grad, *(sums if are_one else grad_buffers)], wanted, strict=True):
        torch.testing.assert_close(seen, true, rtol=rounding, atol=20 * rounding)


def test_tracing_knows_the_shapes() -> None:
    x_BSK, weights = _matrices()
    x_TK = x_BSK.detach().flatten(0, 1)
    plain = [weight.detach() for weight in weights]
    torch.library.opcheck(fused_matmul, (x_TK, plain))
    dy_TN = torch.randn(10, 9, dtype=torch.float64)
    torch.library.opcheck(fused_dgrad, (dy_TN, plain))
    torch.library.opcheck(accumulate_wgrad, ([torch.zeros_like(weight) for weight in plain], dy_TN, x_TK))
