"""The chunked loss equals the plain one, forward and backward, in every dtype."""

import pytest
import torch
from torch.nn import functional

from meshwright.ops.loss import weighted_cross_entropy


def _case(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits_BSV = torch.randn(2, 7, 11, generator=generator, dtype=torch.float64) * 3
    targets_BS = torch.randint(11, (2, 7), generator=generator)
    weights_BS = torch.rand(2, 7, generator=generator, dtype=torch.float64)
    targets_BS[0, 3] = -100
    return logits_BSV.to(dtype).requires_grad_(), targets_BS, weights_BS


@pytest.mark.parametrize("chunk_tokens", [1, 4, 14, 100])
def test_equals_the_plain_sum(chunk_tokens: int) -> None:
    logits_BSV, targets_BS, weights_BS = _case(torch.float64)
    loss = weighted_cross_entropy(logits_BSV, targets_BS, weights_BS, chunk_tokens=chunk_tokens)
    (grad,) = torch.autograd.grad(loss * 0.7, logits_BSV)
    each_BS = functional.cross_entropy(logits_BSV.transpose(1, 2), targets_BS, reduction="none")
    expected = (each_BS * weights_BS).sum()
    (expected_grad,) = torch.autograd.grad(expected * 0.7, logits_BSV)
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sums_wide_and_gives_the_gradient_in_the_dtype_of_the_logits(dtype: torch.dtype) -> None:
    logits_BSV, targets_BS, weights_BS = _case(dtype)
    loss = weighted_cross_entropy(logits_BSV, targets_BS, weights_BS)
    (grad,) = torch.autograd.grad(loss, logits_BSV)
    wide = logits_BSV.detach().double().requires_grad_()
    expected = weighted_cross_entropy(wide, targets_BS, weights_BS)
    (expected_grad,) = torch.autograd.grad(expected, wide)
    assert loss.dtype == torch.float32 and grad.dtype == dtype
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)  # float32 sums
    # one rounding to the dtype of the logits; the terms p and 1 of the gradient are of order one
    rounding = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(grad.double(), expected_grad, rtol=rounding, atol=rounding)


def test_no_target_at_all_is_zero() -> None:
    logits_BSV, targets_BS, weights_BS = _case(torch.float32)
    loss = weighted_cross_entropy(logits_BSV, torch.full_like(targets_BS, -1), weights_BS)
    (grad,) = torch.autograd.grad(loss, logits_BSV)
    assert loss == 0 and not grad.any()
