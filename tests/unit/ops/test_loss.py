"""Head and loss in chunks equal the plain ones, forward and backward, in every dtype, sharded or not."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from meshwright.ops.loss import counted_rows, linear_cross_entropy
from meshwright.ops.loss_rows import PLAIN, RowKernels, Statistics

VOCABULARY = 11  # far from aligned: the rows are padded


def _case(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x_BSD = torch.randn(2, 7, 5, generator=generator, dtype=torch.float64) * 3
    weight_VD = torch.randn(VOCABULARY, 5, generator=generator, dtype=torch.float64)
    targets_BS = torch.randint(VOCABULARY, (2, 7), generator=generator)
    weights_BS = torch.rand(2, 7, generator=generator, dtype=torch.float64)
    targets_BS[0, 3] = -100
    return x_BSD.to(dtype).requires_grad_(), weight_VD.to(dtype).requires_grad_(), targets_BS, weights_BS


def _plain(x_BSD: Tensor, weight_VD: Tensor, targets_BS: Tensor, weights_BS: Tensor) -> Tensor:
    logits_BVS = functional.linear(x_BSD, weight_VD).transpose(1, 2)
    return (functional.cross_entropy(logits_BVS, targets_BS, reduction="none") * weights_BS).sum()


@pytest.mark.parametrize("chunk_bytes", [1, 4 * 64 * 8, 2**30])
def test_equals_the_plain_sum(chunk_bytes: int) -> None:
    x_BSD, weight_VD, targets_BS, weights_BS = _case(torch.float64)
    loss = linear_cross_entropy(x_BSD, weight_VD, targets_BS, weights_BS, chunk_bytes=chunk_bytes)
    expected = _plain(x_BSD, weight_VD, targets_BS, weights_BS)
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
    grads = torch.autograd.grad(loss * 0.7, (x_BSD, weight_VD))
    for grad, wanted in zip(grads, torch.autograd.grad(expected * 0.7, (x_BSD, weight_VD)), strict=True):
        torch.testing.assert_close(grad, wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sums_in_fp32_and_gives_gradients_in_the_dtypes_of_the_inputs(dtype: torch.dtype) -> None:
    x_BSD, weight_VD, targets_BS, weights_BS = _case(dtype)
    loss = linear_cross_entropy(x_BSD, weight_VD, targets_BS, weights_BS)
    dx_BSD, dw_VD = torch.autograd.grad(loss, (x_BSD, weight_VD))
    wide_x, wide_weight = (x.detach().double().requires_grad_() for x in (x_BSD, weight_VD))
    expected = _plain(wide_x, wide_weight, targets_BS, weights_BS)
    wanted = torch.autograd.grad(expected, (wide_x, wide_weight))
    assert (loss.dtype, dx_BSD.dtype, dw_VD.dtype) == (torch.float32, dtype, dtype)
    # Logits of order 10 are rounded to the dtype, so each probability is off by ten roundings or so.
    rounding = 20 * torch.finfo(dtype).eps
    torch.testing.assert_close(loss.double(), expected, rtol=rounding, atol=0)
    for grad, true in zip((dx_BSD, dw_VD), wanted, strict=True):
        error = (grad.double() - true).norm() / true.norm()
        assert error < rounding


def test_autocast_decides_the_dtype_of_compute() -> None:
    x_BSD, weight_VD, targets_BS, weights_BS = _case(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(x_BSD, weight_VD, targets_BS, weights_BS)
    low_x, low_weight = (x.detach().bfloat16() for x in (x_BSD, weight_VD))
    assert loss == linear_cross_entropy(low_x, low_weight, targets_BS, weights_BS)
    grads = torch.autograd.grad(loss, (x_BSD, weight_VD))
    assert [grad.dtype for grad in grads] == [torch.float32, torch.float32]


def test_no_target_at_all_is_zero() -> None:
    x_BSD, weight_VD, targets_BS, weights_BS = _case(torch.float32)
    loss = linear_cross_entropy(x_BSD, weight_VD, torch.full_like(targets_BS, -1), weights_BS)
    grads = torch.autograd.grad(loss, (x_BSD, weight_VD))
    assert loss == 0 and not any(grad.any() for grad in grads)


def test_without_gradients_no_gradient_is_made() -> None:
    x_BSD, weight_VD, targets_BS, weights_BS = _case(torch.float64)

    def must_not_run(*_: Tensor) -> Statistics:
        raise AssertionError

    plain = linear_cross_entropy(x_BSD, weight_VD, targets_BS, weights_BS)
    kernels = PLAIN._replace(to_gradient=must_not_run, unscaled_gradient=must_not_run)
    with torch.no_grad():
        seen = linear_cross_entropy(x_BSD, weight_VD, targets_BS, weights_BS, kernels=kernels)
    assert seen == plain


def test_a_backward_pass_run_twice_gives_the_same_gradients() -> None:
    """Schedules that split the backward pass do so."""
    x_BSD, weight_VD, targets_BS, weights_BS = _case(torch.float64)
    loss = linear_cross_entropy(x_BSD, weight_VD, targets_BS, weights_BS) * 3
    (first,) = torch.autograd.grad(loss, x_BSD, retain_graph=True)
    (second,) = torch.autograd.grad(loss, x_BSD)
    assert torch.equal(first, second)


def _counting(calls: list[str]) -> RowKernels:
    """The plain kernels, which note every accumulation of dW and the rows of every chunk of logits."""

    def accumulate(*args: Any) -> None:
        calls.append("dW")
        PLAIN.accumulate(*args)

    def unscaled(logits_TV: Tensor, targets_T: Tensor) -> Statistics:
        calls.append(f"{len(logits_TV)} rows")
        return PLAIN.unscaled_gradient(logits_TV, targets_T)

    return PLAIN._replace(accumulate=accumulate, unscaled_gradient=unscaled)


def test_a_frozen_head_makes_no_weight_gradient() -> None:
    x_BSD, weight_VD, targets_BS, weights_BS = _case(torch.float64)
    calls: list[str] = []
    (wanted,) = torch.autograd.grad(linear_cross_entropy(x_BSD, weight_VD, targets_BS, weights_BS), x_BSD)
    frozen_VD = weight_VD.detach()
    loss = linear_cross_entropy(x_BSD, frozen_VD, targets_BS, weights_BS, kernels=_counting(calls))
    assert calls == ["14 rows"]
    assert torch.equal(torch.autograd.grad(loss, x_BSD)[0], wanted)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_rows_without_weight_skip_the_head(is_frozen: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x_BSD = torch.randn(2, 200, 5, generator=generator, dtype=torch.float64).requires_grad_()
    weight_VD = torch.randn(VOCABULARY, 5, generator=generator, dtype=torch.float64)
    weight_VD.requires_grad_(not is_frozen)
    targets_BS = torch.randint(VOCABULARY, (2, 200), generator=generator)
    weights_BS = torch.rand(2, 200, generator=generator, dtype=torch.float64)
    weights_BS *= torch.rand(2, 200, generator=generator) < 0.4
    num_counted, calls = int((weights_BS != 0).sum()), []
    loss = linear_cross_entropy(
        x_BSD, weight_VD, targets_BS, weights_BS, num_counted=num_counted, kernels=_counting(calls)
    )
    assert 128 < num_counted <= 256 and calls == ["256 rows"] + ["dW"] * (not is_frozen)
    expected = _plain(x_BSD, weight_VD, targets_BS, weights_BS)
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
    leaves = [x_BSD] if is_frozen else [x_BSD, weight_VD]
    for grad, wanted in zip(
        torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, leaves), strict=True
    ):
        torch.testing.assert_close(grad, wanted, rtol=1e-11, atol=1e-14)


def test_few_rows_without_weight_are_not_worth_a_gather() -> None:
    weights_T = torch.ones(1000)
    assert counted_rows(weights_T, None) is None and counted_rows(weights_T, 900) is None
    weights_T[::2] = 0
    rows_N = counted_rows(weights_T, 500)
    assert rows_N is not None and rows_N[:500].tolist() == list(range(1, 1000, 2)) and len(rows_N) == 512


def test_logits_exist_for_one_chunk_at_a_time() -> None:
    x_BSD, weight_VD, targets_BS, weights_BS = _case(torch.float64)
    seen = []

    def unscaled(logits_TV: Tensor, targets_T: Tensor) -> Statistics:
        seen.append(tuple(logits_TV.shape))
        return PLAIN.unscaled_gradient(logits_TV, targets_T)

    kernels = PLAIN._replace(unscaled_gradient=unscaled)
    linear_cross_entropy(x_BSD, weight_VD, targets_BS, weights_BS, kernels=kernels, chunk_bytes=5 * 64 * 8)
    assert seen == [(5, VOCABULARY), (5, VOCABULARY), (4, VOCABULARY)]
