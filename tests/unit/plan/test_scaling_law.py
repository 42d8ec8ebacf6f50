"""The loss law: its optimum is where the loss is lowest, at about twenty tokens per parameter."""

import pytest

from meshwright.plan.scaling_law import CHINCHILLA


@pytest.mark.parametrize("flops", [1e19, 5.76e23, 1e26])
def test_the_optimum_is_the_lowest_loss(flops: float):
    best = CHINCHILLA.optimal_parameters(flops)
    lowest = CHINCHILLA.loss(best, flops / 6 / best)
    assert all(
        CHINCHILLA.loss(best * factor, flops / 6 / best / factor) > lowest for factor in (0.5, 0.9, 1.1, 2)
    )


def test_chinchillas_own_budget():
    """70B parameters and 1.4T tokens were chosen for 5.76e23 FLOPs; the replication finds the same ratio."""
    best = CHINCHILLA.optimal_parameters(5.76e23)
    assert 5e10 < best < 9e10
    assert 15 < 5.76e23 / 6 / best**2 < 30
