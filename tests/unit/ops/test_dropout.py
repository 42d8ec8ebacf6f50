"""Masks of dropout: their definition, their statistics, gradients, and the same in compiled code."""

import math

import pytest
import torch
from tests.support.dropped_decoder import keys_of_tokens, mask_of, mix
from torch import Tensor
from torch.nn import functional

from meshwright.ops.dropout import DropoutMask, is_kept
from meshwright.ops.dropout_keys import mixed, number_of_name, sequence_keys, token_keys
from meshwright.ops.grouped_mm import grouped_linear

LENGTH, WIDTH = 256, 1024


def keys_of(seed: int = 3, step: int = 0, layer: int = 0, name: str = "mlp.up.weight") -> Tensor:
    """keys_BS of 4 sequences for one matrix."""
    tokens = token_keys(sequence_keys(seed, step, torch.arange(4)), LENGTH)
    return mixed(mixed(tokens, layer), number_of_name(name))


@pytest.mark.parametrize("seed", [0, 3, 2**63 + 5])
@pytest.mark.parametrize("probability", [0.001, 0.1, 0.5])
def test_masks_are_those_of_the_definition(seed: int, probability: float) -> None:
    """That of the oracle, in unsigned integers; a shard of the features has the masks of its features."""
    expected = mask_of(mix(keys_of_tokens(seed, 7, 4, LENGTH), 5), "mlp.up.weight", WIDTH, probability) > 0
    keys = keys_of(seed, step=7, layer=5)
    assert torch.equal(is_kept(keys, 0, WIDTH, probability), expected)
    assert torch.equal(is_kept(keys, 640, 128, probability), expected[..., 640:768])


@pytest.mark.parametrize("probability", [0.01, 0.1, 0.5, 0.9])
def test_the_kept_share(probability: float) -> None:
    """Of a million independent elements it is within five standard deviations, also by row and by feature."""
    kept = is_kept(keys_of(), 0, WIDTH, probability).double().flatten(0, 1)
    spread = math.sqrt(probability * (1 - probability))
    for dims, count in (((0, 1), kept.numel()), ((0,), len(kept)), ((1,), WIDTH)):
        assert (kept.mean(dims) - (1 - probability)).abs().max() < 5 * spread / math.sqrt(count)


OTHERS = {
    "another step": keys_of(step=1),
    "another seed": keys_of(seed=4),
    "another layer": keys_of(layer=1),
    "another matrix": keys_of(name="mlp.gate.weight"),
    "the next position": keys_of().roll(1, 1),
    "the next sequence": keys_of().roll(1, 0),
    "another expert": mixed(keys_of(), 1),
}


@pytest.mark.parametrize("other", OTHERS)
def test_masks_are_uncorrelated(other: str) -> None:
    """Correlations of a million pairs are below five standard deviations, and so are those of features."""
    first, second = (is_kept(keys, 0, WIDTH, 0.1).double() - 0.9 for keys in (keys_of(), OTHERS[other]))
    assert _correlation(first, second) < 5 / math.sqrt(first.numel())
    for shift in (1, 2, 4, 16, 64, 512):
        assert _correlation(first, second.roll(shift, -1)) < 5 / math.sqrt(first.numel())


@pytest.mark.parametrize("shift", [1, 2, 3, 4, 8, 16, 32, 128, 512])
def test_features_are_uncorrelated(shift: int) -> None:
    kept = is_kept(keys_of(), 0, WIDTH, 0.1).double() - 0.9
    assert _correlation(kept[..., shift:], kept[..., :-shift]) < 5 / math.sqrt(kept.numel())


def _correlation(first: Tensor, second: Tensor) -> float:
    return float((first * second).mean() / (0.1 * 0.9)).__abs__()


def test_the_expected_output_is_that_without_dropout() -> None:
    """The mean over 4096 rows with one input; each output is a sum of independent terms x w mask."""
    x, weight = torch.linspace(-1.0, 2.0, 64).double(), torch.randn(3, 64).double()
    keys = token_keys(sequence_keys(1, 0, torch.arange(16)), 256)
    found = DropoutMask(keys, 0, 0.1).linear(x.expand(16, 256, 64), weight).flatten(0, 1)
    deviation = ((weight * x).square().sum(1) * 0.1 / 0.9 / len(found)).sqrt()
    assert ((found.mean(0) - weight @ x).abs() < 5 * deviation).all()


def test_gradients_are_those_of_the_dropped_input() -> None:
    """Of drop, of the linear and of the grouped linear, against autograd through x times the mask."""
    keys = keys_of()[:1, :6].flatten()
    mask = DropoutMask(keys, 3, 0.4)
    factor = is_kept(keys, 3, 5, 0.4).double() / 0.6
    counts_E = torch.tensor([4, 0, 2])
    x, flat, stacked = torch.randn(6, 5).double(), torch.randn(2, 5).double(), torch.randn(3, 2, 5).double()
    pairs = [
        (lambda x, _: mask.drop(x), lambda x, _: x * factor, flat),
        (mask.linear, lambda x, w: functional.linear(x * factor, w), flat),
        (
            lambda x, w: mask.grouped_linear(x, w, counts_E, None),
            lambda x, w: grouped_linear(x * factor, w, counts_E),
            stacked,
        ),
    ]
    for ours, plain, weight in pairs:
        (found, *gradients), (expected, *others) = (_with_gradients(one, x, weight) for one in (ours, plain))
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(gradients, others)


def _with_gradients(function, x: Tensor, weight: Tensor) -> list[Tensor | None]:
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = function(x, weight)
    y.square().sum().backward()
    return [y.detach(), x.grad, weight.grad]


def test_nothing_but_the_input_is_saved() -> None:
    """No mask and no dropped copy: what three adapters on one input save is that input, once."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    x = torch.randn(4, LENGTH, 32, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for name in ("query", "key", "value"):
            DropoutMask(keys_of(name=name), 0, 0.1).linear(x, torch.randn(2, 32, requires_grad=True))
    large = {one.untyped_storage().data_ptr() for one in saved if one.numel() >= x.numel()}
    assert large == {x.untyped_storage().data_ptr()}


def test_compiled_code_has_the_same_masks() -> None:
    keys, x = keys_of()[:, :16], torch.randn(4, 16, 64)
    compiled = torch.compile(lambda x, keys: DropoutMask(keys, 128, 0.1).drop(x), fullgraph=True)
    assert torch.equal(compiled(x, keys), DropoutMask(keys, 128, 0.1).drop(x))
