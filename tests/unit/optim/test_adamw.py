"""AdamW on bf16 weights and moments: the fp32 trajectory, or near it."""

import copy

import pytest
import torch
from torch import Tensor, nn

from meshwright.optim.build import (
    build_optimizer,
    master_weights,
    set_learning_rate,
    set_master_weights,
    state_tensors,
)
from meshwright.optim.full_parameter import FullParameter
from meshwright.spec import OptimSpec

OPTIM = OptimSpec(lr=0.01, beta2=0.99, weight_decay=0.1)
SHAPES = {"matrix": (40, 30), "stack": (3, 8, 10), "vector": (50,)}
NUM_STEPS = 20


def start(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    values = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SHAPES.items()}
    return {name: nn.Parameter(value.to(dtype)) for name, value in values.items()}


def gradients(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SHAPES.items()}


def trained(optim: OptimSpec, weights: str, dtype: torch.dtype):
    named = start(dtype)
    optimizer = build_optimizer(named, optim, weights=weights)
    for step in range(NUM_STEPS):
        set_learning_rate(optimizer, optim.lr)
        for name, gradient in gradients(step).items():
            named[name].grad = gradient.to(dtype)
        optimizer.step()
    return named, optimizer


@pytest.mark.parametrize("kind", ("adamw", "sgd", "lars", "lamb", "adafactor", "muon", "adamw_8bit"))
def test_exact_weights_follow_the_fp32_trajectory(kind):
    """Same gradients, so the masters equal fp32 weights; the model sees them rounded."""
    optim = OPTIM.with_(kind=kind)
    expected, _ = trained(optim, "fp32", torch.float32)
    named, optimizer = trained(optim, "bf16_exact", torch.bfloat16)
    masters = master_weights(optimizer, named)
    for name, weight in expected.items():
        # Bit by bit, except where fp32 weights have torch's kernels, which multiply in another order.
        rtol = 2e-6 if kind in ("adamw", "sgd") else 0.0
        assert torch.allclose(masters[name], weight, rtol=rtol, atol=rtol)
        assert not torch.equal(weight.bfloat16().float(), weight)
        away = (named[name].double() - masters[name].double()).abs()
        assert (away <= 2.0**-8 * masters[name].double().abs()).all()


@pytest.mark.parametrize("kind", ("adamw", "sgd", "adamw_8bit"))
def test_stochastic_weights_stay_near(kind):
    """One step of bf16 is 2^-8 of a number; 20 roundings walk sqrt(20) of them."""
    optim = OPTIM.with_(kind=kind)
    expected, _ = trained(optim, "fp32", torch.float32)
    named, optimizer = trained(optim, "bf16_stochastic", torch.bfloat16)
    assert not master_weights(optimizer, named)
    for name, weight in expected.items():
        away = (named[name].float() - weight).square().mean().sqrt() / weight.square().mean().sqrt()
        assert 1e-4 < away < 2.0**-8 * NUM_STEPS**0.5


def test_bf16_moments_stay_near_and_move():
    """The second moment moves by 1% a step and less: rounding to nearest would never change it."""
    expected, exact = trained(OPTIM.with_(beta2=0.999), "fp32", torch.float32)
    optim = OPTIM.with_(beta2=0.999, state="bf16")
    named, optimizer = trained(optim, "fp32", torch.float32)
    for name, states in state_tensors(optimizer, named, optim).items():
        for key, state in states.items():
            assert state.dtype == torch.bfloat16
            right = exact.state[expected[name]][key]
            # A mean over elements: what is left of 20 roundings by up to 2^-8, one way or the other.
            ratio = state.double().abs().mean() / right.double().abs().mean()
            assert abs(ratio - 1) < 0.01
        assert torch.allclose(named[name], expected[name], rtol=0.02, atol=0.002)


@pytest.mark.parametrize(
    "slices",
    [(slice(0, 13), slice(0, 30)), (slice(13, 40), slice(0, 30)), (slice(0, 40), slice(11, 30))],
    ids=("first rows", "other rows", "columns"),
)
@pytest.mark.parametrize("kind", ("adamw", "sgd"))
def test_a_shard_is_updated_as_in_the_full_parameter(slices, kind):
    """Noise is that of the full parameter, so any sharding gives equal bits."""
    optim = OPTIM.with_(kind=kind, state="bf16" if kind == "adamw" else "fp32")
    full, _ = trained(optim, "bf16_stochastic", torch.bfloat16)
    part = {"matrix": nn.Parameter(start(torch.bfloat16)["matrix"].detach()[slices].clone())}
    where = {
        "matrix": FullParameter("matrix", torch.Size(SHAPES["matrix"]), slices, (), lambda tensor: tensor)
    }
    optimizer = build_optimizer(part, optim, where, weights="bf16_stochastic")
    for step in range(NUM_STEPS):
        part["matrix"].grad = gradients(step)["matrix"][slices].clone()
        optimizer.step()
    assert torch.equal(part["matrix"], full["matrix"][slices])


def test_masters_are_taken_over_bit_by_bit():
    named, optimizer = trained(OPTIM, "bf16_exact", torch.bfloat16)
    masters = copy.deepcopy(master_weights(optimizer, named))
    others = start(torch.bfloat16)
    other = build_optimizer(others, OPTIM, weights="bf16_exact")
    set_master_weights(other, others, masters)
    for name, value in master_weights(other, others).items():
        assert torch.equal(value, masters[name])
        assert torch.equal(others[name], named[name])


@pytest.mark.parametrize(
    ("weights", "optim", "expected"),
    [
        ("bf16_exact", OptimSpec(state="bf16"), 10.0),
        ("bf16_stochastic", OptimSpec(state="bf16"), 8.0),
        ("bf16_stochastic", OptimSpec(kind="adamw_8bit"), 6.0 + 2 * 4 / 256),
        ("bf16_exact", OptimSpec(), 14.0),
    ],
)
def test_bytes_per_parameter(weights, optim, expected):
    """Weight, bf16 gradient, and everything the optimizer keeps."""
    shard = nn.Parameter(torch.zeros(1024, 1024, dtype=torch.bfloat16))
    optimizer = build_optimizer({"matrix": shard}, optim, weights=weights)
    stored = sum(state.nbytes for state in optimizer.state[shard].values())
    assert (2 * shard.nbytes + stored) / shard.numel() == expected
