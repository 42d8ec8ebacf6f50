"""Parameter groups, states and their reconstruction."""

import pytest
import torch
from torch import nn

from meshwright.optim.build import build_optimizer, parameter_groups, set_num_updates, state_tensors
from meshwright.optim.ema import Ema
from meshwright.spec import OptimSpec


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


def test_all_decay_when_told():
    decaying, others = parameter_groups(shards(), OptimSpec(decay="all"))
    assert len(decaying["params"]) == 5
    assert others["params"] == []


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


@pytest.mark.parametrize("kind", ("adamw", "sgd"))
def test_a_rebuilt_optimizer_goes_on_bit_by_bit(kind):
    """States copied and the number of updates told: the next update is the same."""
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
