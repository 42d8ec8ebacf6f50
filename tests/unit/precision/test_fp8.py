"""The three fp8 matmuls of a linear against float64, and the rounding itself, bit by bit."""

import math

import pytest
import torch

from meshwright.precision.fp8.cached_weights import CachedFp8Weight
from meshwright.precision.fp8.linear import NO_AMAX_GROUPS, Fp8Options, fp8_linears
from meshwright.precision.fp8.matmul import tiled_scales
from meshwright.precision.fp8.quantise import block_amax, decode, encode, power_of_two_scale, quantise
from meshwright.precision.fp8.recipes import E4M3, E5M2, RECIPES

T, K, N = 256, 384, 128
# Relative Frobenius error of one linear on Gaussian data. Rounding to 4 (E4M3) or 3 (E5M2) significant bits
# is off by 2.6% or 5.2% rms; two operands add up in squares. The bands are what was seen, 10% wider.
E4M3_PAIR, MIXED_PAIR = (0.033, 0.042), (0.052, 0.066)
BANDS = {
    "current": (E4M3_PAIR, MIXED_PAIR, MIXED_PAIR),
    "blockwise": (E4M3_PAIR, E4M3_PAIR, E4M3_PAIR),
    "mxfp8": (E4M3_PAIR, E4M3_PAIR, E4M3_PAIR),
}


def _normal(*shape: int, seed: int, std: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * std


def fp8_linear(x, weight, recipe):
    return fp8_linears(x, (weight,), Fp8Options(recipe, native=False, amax_groups=NO_AMAX_GROUPS))[0][0]


def _three_matmuls(recipe: str, x, weight, grad):
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = fp8_linear(x, weight, recipe)
    y.backward(grad)
    exact = (x @ weight.T, grad @ weight, grad.T @ x)
    return zip((y.detach(), x.grad, weight.grad), [each.detach() for each in exact], strict=True)


def _error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float((ours.double() - exact.double()).norm() / exact.double().norm())


@pytest.mark.parametrize("recipe", BANDS)
def test_matmuls_on_gaussian_data_stay_in_their_bands(recipe):
    x, weight, grad = _normal(T, K, seed=0), _normal(N, K, seed=1, std=0.02), _normal(T, N, seed=2, std=1e-5)
    matmuls = _three_matmuls(recipe, x.double(), weight.double(), grad.double())
    for (ours, exact), (least, most) in zip(matmuls, BANDS[recipe], strict=True):
        assert least < _error(ours, exact) < most


@pytest.mark.parametrize("recipe", BANDS)
def test_result_has_the_dtype_of_the_input_and_gradients_those_of_their_tensors(recipe):
    x = _normal(T, K, seed=0).bfloat16().requires_grad_()
    weight = _normal(N, K, seed=1).requires_grad_()
    y = fp8_linear(x, weight, recipe)
    y.sum().backward()
    assert (y.dtype, x.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)


@pytest.mark.parametrize("recipe", BANDS)
def test_zeros_give_zeros(recipe):
    zeros = (torch.zeros(T, K), torch.zeros(N, K), torch.zeros(T, N))
    for ours, exact in _three_matmuls(recipe, *zeros):
        assert torch.equal(ours, exact)


@pytest.mark.parametrize("recipe", BANDS)
def test_equal_rows_give_equal_rows(recipe):
    row = _normal(1, K, seed=0).expand(T, K).contiguous()
    y = fp8_linear(row, _normal(N, K, seed=1), recipe)
    assert torch.equal(y, y[:1].expand(T, N))


def test_one_outlier_drowns_a_tensor_but_only_its_own_block():
    x, weight, grad = _normal(T, K, seed=0), _normal(N, K, seed=1), _normal(T, N, seed=2)
    x[0, 0] = 2.0**24
    errors = {}
    for recipe in BANDS:
        y, exact = next(_three_matmuls(recipe, x.double(), weight.double(), grad.double()))
        errors[recipe] = _error(y[1:], exact[1:])  # rows without the outlier
    # 2^24 / 448 is larger than what half of the normal numbers round to: they become 0.
    assert errors["current"] > 0.9
    assert errors["blockwise"] < E4M3_PAIR[1]
    assert errors["mxfp8"] < E4M3_PAIR[1]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("recipe", BANDS)
def test_what_is_not_finite_is_not_hidden(recipe, bad):
    x = _normal(T, K, seed=0)
    x[3, 5] = bad
    y = fp8_linear(x, _normal(N, K, seed=1), recipe)
    assert not y[3].isfinite().any()
    if recipe != "current":  # other rows have scales of their own
        assert y[4:].isfinite().all()


@pytest.mark.parametrize(("dtype", "largest"), [(E4M3, 448.0), (E5M2, 57344.0)])
def test_scale_is_the_smallest_power_of_two_that_fits(dtype, largest):
    exponents = torch.arange(-100, 101).double()
    amax = torch.cat([2.0**exponents * factor for factor in (1.0, 1.5, 1.75, 1.7500002, 1.9999999)]).float()
    scale = power_of_two_scale(amax, dtype)
    assert (scale.log2() == scale.log2().round()).all()
    assert (amax.double() / scale <= largest).all()
    assert (amax.double() / (scale / 2) > largest).all()


def test_scale_at_the_ends_of_the_range():
    ends = torch.tensor([0.0, 1e-44, torch.finfo(torch.float32).max, math.inf, math.nan])
    scale = power_of_two_scale(ends, E4M3)
    assert scale[:3].isfinite().all() and (scale[:3].reciprocal() > 0).all()
    assert scale[3:].isnan().all()


@pytest.mark.parametrize(("dtype", "largest"), [(E4M3, 448.0), (E5M2, 57344.0)])
def test_stale_scales_saturate(dtype, largest):
    x = torch.tensor([[1.0, -1e6, 1e9, math.nan]])
    values = encode(x, torch.tensor(1.0), dtype, None).values_MK.float()
    assert values[0, :3].tolist() == [1.0, -largest, largest]
    assert values[0, 3].isnan()


def test_every_fp8_number_survives():
    for dtype in (E4M3, E5M2):
        numbers = torch.arange(256).to(torch.uint8).view(dtype).float()
        numbers = numbers[numbers.isfinite()].view(1, -1)
        for shift in (-20, 0, 20):
            x = numbers * 2.0**shift
            assert torch.equal(decode(quantise(x, dtype, None), torch.float32), x)


@pytest.mark.parametrize("recipe", RECIPES)
def test_bf16_holds_decoded_numbers_exactly(recipe):
    rule = RECIPES[recipe]
    x = quantise(_normal(256, 256, seed=0), rule.operand, rule.weight_block)
    assert torch.equal(decode(x, torch.bfloat16).double(), decode(x, torch.float64))


def test_tiled_scales_are_where_the_tensor_cores_read_them():
    """Each scale is looked up by the formula of the tile; 2^e is stored as the byte e + 127."""
    rows, columns = 200, 6
    exponents = (torch.arange(rows * columns) % 200).view(rows, columns) - 100
    stored = tiled_scales(2.0 ** exponents.float()).view(torch.uint8)
    assert len(stored) == 256 * 8
    for row, column in [(0, 0), (31, 3), (32, 0), (127, 3), (128, 4), (199, 5), (70, 2)]:
        tile = (row // 128) * 2 + column // 4
        place = 512 * tile + 16 * (row % 32) + 4 * (row % 128 // 32) + column % 4
        assert stored[place] == exponents[row, column] + 127


def test_block_amax_by_hand():
    x = torch.arange(24.0).view(4, 6) - 12
    assert block_amax(x, None) == 12
    assert block_amax(x, (2, 3)).tolist() == [[12.0, 9.0], [8.0, 11.0]]
    assert block_amax(x, (1, 3)).tolist() == [[12, 9], [6, 3], [2, 5], [8, 11]]


@pytest.mark.parametrize("recipe", BANDS)
def test_compiled_without_a_break_equals_eager_bit_by_bit(recipe):
    def linear(x, weight):
        return fp8_linear(x.relu(), weight, recipe)

    results = []
    for function in (linear, torch.compile(linear, fullgraph=True)):
        x = _normal(T, K, seed=0).bfloat16().requires_grad_()
        weight = _normal(N, K, seed=1).requires_grad_()
        y = function(x, weight)
        y.backward(_normal(T, N, seed=2).bfloat16())
        results.append((y.detach(), x.grad, weight.grad))
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)


def _fused_matmuls(weights, recipe, cached_weight=None):
    """The output of each matrix, the gradient of x, and the gradient of each matrix."""
    x = _normal(T, K, seed=0).requires_grad_()
    weights = [weight.clone().requires_grad_() for weight in weights]
    options = Fp8Options(recipe, native=False, amax_groups=NO_AMAX_GROUPS)
    ys, _ = fp8_linears(x, weights, options, cached_weight=cached_weight)
    torch.cat(ys, dim=1).backward(_normal(T, sum(map(len, weights)), seed=2))
    return [*(y.detach() for y in ys), x.grad, *(weight.grad for weight in weights)]


WEIGHTS = [_normal(rows, K, seed=rows) for rows in (N, 2 * N)]


@pytest.mark.parametrize("recipe", BANDS)
def test_several_matrices_are_one_with_all_their_rows(recipe):
    y1, y2, dx, dw1, dw2 = _fused_matmuls(WEIGHTS, recipe)
    y, dx_stacked, dw = _fused_matmuls([torch.cat(WEIGHTS)], recipe)
    assert torch.equal(torch.cat((y1, y2), 1), y)
    assert torch.equal(dx, dx_stacked)
    assert torch.equal(torch.cat((dw1, dw2)), dw)


@pytest.mark.parametrize("recipe", BANDS)
def test_cached_weights_equal_a_fresh_cast(recipe):
    cached_weight = CachedFp8Weight(recipe, 3 * N, K).to_empty(device="cpu")
    cached_weight.cast(WEIGHTS, power_of_two_scale(torch.cat(WEIGHTS).abs().amax(), E4M3))
    for ours, fresh in zip(
        _fused_matmuls(WEIGHTS, recipe, cached_weight), _fused_matmuls(WEIGHTS, recipe), strict=True
    ):
        assert torch.equal(ours, fresh)
