"""The norm counts every parameter once, on every rank the same, and clipping uses it."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from meshwright.optim.build import build_optimizer, master_weights
from meshwright.optim.clip import clip_gradients, global_norm
from meshwright.spec import OptimSpec

CPU = torch.device("cpu")


def gradient(seed: int, size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def shard(values: torch.Tensor) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros_like(values))
    parameter.grad = values.clone()
    return parameter


def _norm_here() -> tuple[float, float, torch.Tensor]:
    """A sharded parameter, a replicated one, a tied copy that counts nothing, and an empty shard."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    held = [
        (shard(gradient(10 + rank, 5)), 1.0),
        (shard(gradient(1, 7)), 1 / num_ranks),
        (shard(gradient(2, 3)), 0.0),
        (shard(gradient(3, 0)), 1.0),
    ]
    norm = global_norm(held, CPU)
    returned = clip_gradients(held, 0.5, CPU)
    after = global_norm(held, CPU)
    assert torch.equal(norm, returned)
    return float(norm), float(after), held[2][0].grad


@pytest.mark.parametrize("num_ranks", (1, 2, 4))
def test_equals_the_norm_of_gathered_gradients(ranks, num_ranks):
    full = torch.cat([gradient(1, 7), *(gradient(10 + rank, 5) for rank in range(num_ranks))])
    results = ranks.run(_norm_here, num_ranks)
    assert len({norm for norm, _, _ in results}) == 1
    for norm, after, tied in results:
        assert norm == pytest.approx(float(full.norm()), rel=1e-14)
        assert after == pytest.approx(0.5, rel=1e-5)  # torch divides by norm + 1e-6
        # What counts nothing in the norm is clipped like all the rest.
        torch.testing.assert_close(tied, gradient(2, 3) * 0.5 / (norm + 1e-6))


def test_a_small_norm_is_left_alone():
    held = [(shard(gradient(1, 7) * 1e-3), 1.0)]
    clip_gradients(held, 1.0, CPU)
    assert torch.equal(held[0][0].grad, gradient(1, 7) * 1e-3)


def test_the_loss_scale_is_undone_before_clipping():
    held = [(shard(gradient(1, 7) * 1024), 1.0)]
    norm = clip_gradients(held, 100.0, CPU, scale=1024.0)
    assert float(norm) == pytest.approx(float(gradient(1, 7).norm()))
    torch.testing.assert_close(held[0][0].grad, gradient(1, 7))


def _norm_with_inf() -> float:
    values = gradient(1, 4)
    if dist.get_rank() == 1:
        values[2] = torch.inf
    return float(global_norm([(shard(values), 0.5)], CPU))


def test_inf_on_one_rank_reaches_all(ranks):
    assert ranks.run(_norm_with_inf, 2) == [torch.inf, torch.inf]


def test_large_fp32_gradients_do_not_overflow_the_norm():
    """Their squares exceed fp32; the norm itself does not."""
    large = nn.Parameter(torch.zeros(4))
    large.grad = torch.full((4,), 1e30)
    assert float(global_norm([(large, 1.0)], CPU)) == pytest.approx(2e30)


def _step_of(kind: str, *, hands_on: bool) -> tuple[bool, dict[str, torch.Tensor]]:
    """One clipped step: whether the gradients stayed as they were, and what came of them.

    Adam's step itself is the same for a gradient of any size; its moments are not.
    """
    values = {"matrix": gradient(1, 512).view(2, 256), "vector": gradient(2, 5)}
    shards = {name: nn.Parameter(value.bfloat16()) for name, value in values.items()}
    for one in shards.values():
        one.grad = one.detach().clone()
    optimizer = build_optimizer(shards, OptimSpec(kind=kind, lr=0.1), weights="bf16_exact")
    pairs = [(one, 1.0) for one in shards.values()]
    clip_gradients(pairs, 2.0**-3, CPU, optimizer=optimizer if hands_on else None)
    is_same = all(torch.equal(one.grad, one) for one in shards.values())
    optimizer.step()
    assert not isinstance(optimizer.gradient_scale, torch.Tensor)  # of one step alone
    states = {
        f"{name} {key}": value for name, one in shards.items() for key, value in optimizer.state[one].items()
    }
    moments = {name: value for name, value in states.items() if value.is_floating_point()}
    return is_same, {**moments, **master_weights(optimizer, shards)}


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit"])
def test_a_rule_that_clips_as_it_reads_takes_the_same_step(kind):
    (stays, found), (stays_not, expected) = (_step_of(kind, hands_on=on) for on in (True, False))
    assert stays and not stays_not
    assert any("exp_avg" in name for name in found)
    for name, value in expected.items():
        # A gradient clipped beforehand is rounded to bf16 once more, its square twice: 2^-9 each.
        torch.testing.assert_close(found[name], value, rtol=2.0**-7, atol=1e-9)
