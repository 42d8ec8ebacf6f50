"""Grouped matmuls of experts in fp8 against the exact ones: values, gradients, ragged and empty experts."""

import pytest
import torch

from meshwright.models.layers.experts_fp8 import Fp8GroupedLinears, quantise_rows
from meshwright.models.layers.experts_stored import StoredExperts, StoredFp8GroupedLinears
from meshwright.precision.fp8.expert_weights import (
    CachedFp8Experts,
    decode_experts,
    deferred_transposed_experts,
    encode_experts,
    expert_scales,
)
from meshwright.precision.fp8.recipes import E4M3, RECIPES
from meshwright.precision.fp8.stored import encode_stored, stored_scale, weight_amax

COUNTS = torch.tensor([37, 0, 5, 86])
D, F = 256, 128
# Rounding to E4M3 is off by 2.6% rms; two operands add up in squares.
PAIR = (0.033, 0.042)
EXACT = 1e-6


def _normal(*shape: int, seed: int, std: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * std


def _inputs(num_rows: int = int(COUNTS.sum())):
    """Rows and experts of very different sizes."""
    x = _normal(num_rows, D, seed=0) * torch.exp2(_normal(num_rows, 1, seed=3, std=4.0))
    weights = [_normal(len(COUNTS), F, D, seed=seed, std=0.02) for seed in (1, 2)]
    return x, [weight * torch.tensor([1.0, 1.0, 1e-3, 30.0])[:, None, None] for weight in weights]


def _results(matmul, x, weights, counts=COUNTS):
    """Outputs, input gradients and weight gradients of two matmuls with the same rows."""
    xs, weights = [x.clone().requires_grad_() for _ in weights], [w.clone().requires_grad_() for w in weights]
    ys = matmul(xs, weights, counts)
    torch.autograd.backward(ys, [_normal(*y.shape, seed=4, std=1e-5).to(y.dtype) for y in ys])
    return [y.detach() for y in ys], [x.grad for x in xs], [weight.grad for weight in weights]


def _exactly(xs, weights, counts):
    parts = [
        zip(x.split(counts.tolist()), weight, strict=True) for x, weight in zip(xs, weights, strict=True)
    ]
    return [torch.cat([x @ weight.T for x, weight in part]) for part in parts]


def _by_row(ours, exact) -> torch.Tensor:
    return (ours.double() - exact.double()).norm(dim=1) / exact.double().norm(dim=1)


def _fp8(recipe: str, dtype: torch.dtype = torch.float32, cached=()) -> Fp8GroupedLinears:
    return Fp8GroupedLinears(recipe, dtype=dtype, native=False, cached_weights=cached)


@pytest.mark.parametrize("recipe", ["current", "blockwise"])
def test_every_row_is_within_the_error_of_the_format(recipe):
    x, weights = _inputs()
    found, exact = (
        _results(each, x.double(), [w.double() for w in weights])
        for each in (_fp8(recipe, torch.float64), _exactly)
    )
    for kind in (0, 1):
        for ours, expected in zip(found[kind], exact[kind], strict=True):
            assert PAIR[0] < float(_by_row(ours, expected).square().mean().sqrt()) < PAIR[1]
            assert float(_by_row(ours, expected).max()) < 0.07  # no row drowns in a larger one
    for ours, expected in zip(found[2], exact[2], strict=True):
        assert float((ours - expected).norm() / expected.norm()) < EXACT  # weight gradients are not in fp8
        assert not ours[1].any()


def test_stored_experts_are_those_that_are_cast_for_use():
    """Each with its own scale, in forward and in dgrad; the experts differ in size by four orders."""
    x, weights = _inputs()
    scales = [stored_scale(weight_amax(weight)) for weight in weights]
    stored = [StoredExperts(encode_stored(*pair), pair[1]) for pair in zip(weights, scales, strict=True)]
    ys, dxs, _ = _results(_fp8("current"), x, weights)
    matmul, xs = StoredFp8GroupedLinears(dtype=torch.float32, native=False), [x.clone() for _ in weights]
    found = matmul([x.requires_grad_() for x in xs], stored, COUNTS)
    torch.autograd.backward(found, [_normal(*y.shape, seed=4, std=1e-5) for y in found])
    for ours, expected in zip([*found, *(x.grad for x in xs)], [*ys, *dxs], strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("recipe", ["current", "blockwise"])
def test_a_row_does_not_depend_on_the_others(recipe):
    """So it rounds alike wherever ep sends it."""
    x, weights = _inputs()
    together = _fp8(recipe)([x], weights[:1], COUNTS)[0]
    alone = _fp8(recipe)([x[-86:]], [weights[0][3:]], torch.tensor([86]))[0]
    torch.testing.assert_close(together[-86:], alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("recipe", ["current", "blockwise"])
def test_no_rows_at_all(recipe):
    x, weights = _inputs(0)
    ys, dxs, dweights = _results(_fp8(recipe), x, weights, torch.zeros(4, dtype=torch.int64))
    assert [tuple(y.shape) for y in ys] == [(0, F)] * 2 and [tuple(dx.shape) for dx in dxs] == [(0, D)] * 2
    assert not any(dweight.any() for dweight in dweights)


@pytest.mark.parametrize("recipe", ["current", "blockwise"])
def test_cached_weights_equal_a_fresh_cast(recipe):
    x, weights = _inputs()
    cached = [CachedFp8Experts(recipe, weight.shape).to_empty(device="cpu") for weight in weights]
    matmul = _fp8(recipe, torch.bfloat16, cached)
    matmul.cast(weights)
    for kept, fresh in zip(
        _results(matmul, x, weights), _results(_fp8(recipe, torch.bfloat16), x, weights), strict=True
    ):
        assert all(torch.equal(*pair) for pair in zip(kept, fresh, strict=True))


@pytest.mark.parametrize("recipe", ["current", "blockwise"])
def test_weights_transposed_in_backward_have_the_same_bits(recipe):
    weight, rule = _inputs()[1][0], RECIPES[recipe]
    scale = expert_scales(weight, rule)
    assert scale.shape == ((4, 1, 1) if recipe == "current" else (4, 1, 2))
    values = encode_experts(weight, scale, rule).values_ENK
    transposed = deferred_transposed_experts(weight, scale, E4M3, torch.zeros(1))
    assert torch.equal(transposed.view(torch.uint8), values.transpose(1, 2).contiguous().view(torch.uint8))
    torch.library.opcheck(deferred_transposed_experts, (weight, scale, E4M3, torch.zeros(1)))
    by_expert = (decode_experts(encode_experts(weight, scale, rule), torch.float32) - weight).norm(dim=(1, 2))
    assert (by_expert / weight.norm(dim=(1, 2)) < 0.03).all()  # one of them is 30,000 times another


def test_frozen_weights_get_no_gradient():
    x, weights = _inputs()
    x.requires_grad_()
    _fp8("current")([x], weights[:1], COUNTS)[0].sum().backward()
    assert x.grad is not None and weights[0].grad is None


@pytest.mark.parametrize("recipe", ["current", "blockwise"])
def test_compiled_equals_eager_bit_by_bit(recipe):
    x, weights = _inputs()
    rule = RECIPES[recipe]
    eager, compiled = (
        (*function(x.bfloat16(), rule), scales(weights[0], rule))
        for function, scales in (
            (quantise_rows, expert_scales),
            (torch.compile(quantise_rows, fullgraph=True), torch.compile(expert_scales, fullgraph=True)),
        )
    )
    for a, b in zip(eager, compiled, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
