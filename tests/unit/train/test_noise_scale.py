"""The estimator: right on average for gradients whose noise is known."""

import pytest
import torch

from meshwright.train.noise_scale import HalfBatchGradient
from meshwright.train.state import TrainState


def test_finds_the_noise_that_was_put_in():
    """Per token: mean gradient of square norm 4 and variance 3 in each of 1000 coordinates."""
    generator = torch.Generator().manual_seed(0)
    mean = torch.zeros(1000, dtype=torch.float64)
    mean[0] = 2.0
    state = TrainState()
    for _ in range(400):
        tokens = mean + 3**0.5 * torch.randn(60, 1000, generator=generator, dtype=torch.float64)
        part = tokens[:20].sum(0) / 60
        measured = HalfBatchGradient(part.norm(), torch.tensor(20 / 60, dtype=torch.float64), 60)
        estimate = measured.estimate(float((tokens.sum(0) / 60).norm()))
        assert estimate is not None
        state = state.after_estimate(signal=estimate.signal, noise=estimate.noise)
    # The last 20 estimates count: of the noise each is good to some 7%, of the signal (4 of a squared norm
    # of 54) to some 80%.
    assert state.gradient_noise == pytest.approx(3000, rel=0.1)
    assert state.gradient_signal == pytest.approx(4, rel=0.8)
    assert state.noise_scale_tokens == state.gradient_noise / state.gradient_signal
    assert TrainState.from_facts(state.to_facts()) == state


@pytest.mark.parametrize("share", (0.0, 1.0))
def test_a_half_without_targets_gives_no_estimate(share):
    assert HalfBatchGradient(torch.tensor(1.0), torch.tensor(share), 60).estimate(1.0) is None


def test_no_scale_without_a_positive_signal():
    assert TrainState().noise_scale_tokens is None
    assert TrainState().after_estimate(signal=-1.0, noise=2.0).noise_scale_tokens is None
