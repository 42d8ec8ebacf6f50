"""Parameter groups, states and their reconstruction."""

from typing import get_args

import pytest
import torch
from torch import nn

from meshwright.optim.build import (
    build_optimizer,
    parameter_groups,
    set_learning_rate,
    set_num_updates,
    state_tensors,
)
from meshwright.optim.ema import Ema
from meshwright.spec import GroupSpec, OptimSpec

ALL_KINDS = get_args(OptimSpec.model_fields["kind"].annotation)


def shards() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"table": (5, 3), "experts": (2, 3, 3), "norm": (3,), "bias": (4,), "empty": (0, 3)}
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}


def test_vectors_do_not_decay():
    named = shards()
    decaying, others = parameter_groups(named, OptimSpec(weight_decay=0.3))
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.3, 0.0)
    assert [id(p) for p in decaying["params"]] == [id(named[name]) for name in ("table", "experts", "empty")]
    assert [id(p) for p in others["params"]] == [id(named[name]) for name in ("norm", "bias")]


def test_all_decay_when_set():
    decaying, others = parameter_groups(shards(), OptimSpec(weight_decay_on="all"))
    assert len(decaying["params"]) == 5
    assert others["params"] == []


def test_the_last_group_that_matches_counts():
    groups = (GroupSpec(pattern="*", lr_factor=0.5), GroupSpec(pattern="n*", weight_decay=0.2))
    named = shards()
    found = parameter_groups(named, OptimSpec(weight_decay=0.3, groups=groups))
    settings = {
        id(p): (group["lr_factor"], group["weight_decay"]) for group in found for p in group["params"]
    }
    assert settings[id(named["norm"])] == (1.0, 0.2)
    assert settings[id(named["bias"])] == (0.5, 0.0)
    assert settings[id(named["table"])] == (0.5, 0.3)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_group_moves_at_its_own_rate(kind):
    named = {"slow": nn.Parameter(torch.ones(4)), "fast": nn.Parameter(torch.ones(4))}
    groups = (GroupSpec(pattern="slow", lr_factor=0.5),)
    optimizer = build_optimizer(named, OptimSpec(kind=kind, weight_decay=0.0, groups=groups))
    set_learning_rate(optimizer, 0.1)
    _step(optimizer, named)
    torch.testing.assert_close(2 * (1 - named["slow"]), 1 - named["fast"])


@pytest.mark.parametrize("kind", ("adamw", "sgd"))
def test_states_are_allocated_before_the_first_step(kind):
    named = shards()
    optim = OptimSpec(kind=kind)
    states = state_tensors(build_optimizer(named, optim), named, optim)
    expected = {"adamw": {"exp_avg", "exp_avg_sq"}, "sgd": {"momentum_buffer"}}[kind]
    for name, parts in states.items():
        assert set(parts) == expected
        assert all(part.shape == named[name].shape and not part.any() for part in parts.values())


def test_sgd_without_momentum_keeps_nothing():
    named, optim = shards(), OptimSpec(kind="sgd", beta1=0.0)
    assert state_tensors(build_optimizer(named, optim), named, optim) == {name: {} for name in named}


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_rebuilt_optimizer_goes_on_bit_by_bit(kind):
    """With copied states and the number of updates set, the next update is the same."""
    optim = OptimSpec(kind=kind, lr=0.1)
    first = shards()
    optimizer = build_optimizer(first, optim)
    for _ in range(3):
        _step(optimizer, first)
    second = {name: nn.Parameter(p.detach().clone()) for name, p in first.items()}
    rebuilt = build_optimizer(second, optim)
    saved = state_tensors(optimizer, first, optim)
    for name, parts in state_tensors(rebuilt, second, optim).items():
        for key, part in parts.items():
            part.copy_(saved[name][key])
    set_num_updates(rebuilt, second, optim, num_updates=3)
    _step(optimizer, first)
    _step(rebuilt, second)
    assert all(torch.equal(first[name], second[name]) for name in first)


def _step(optimizer: torch.optim.Optimizer, named: dict[str, nn.Parameter]) -> None:
    for p in named.values():
        p.grad = torch.sin(p.detach())
    optimizer.step()


def test_averages_follow_the_weights():
    named = shards()
    ema = Ema(named, 0.75)
    start = named["table"].detach().clone()
    with torch.no_grad():
        named["table"] += 1.0
    assert torch.equal(ema.averages["table"], start)
    ema.update()
    torch.testing.assert_close(ema.averages["table"], start + 0.25)
    ema.restart()
    assert torch.equal(ema.averages["table"], named["table"])
