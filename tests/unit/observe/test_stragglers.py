"""Stragglers by the own time of each rank: named with their cause, and no false alarm."""

import numpy as np
import pytest

from meshwright.observe.rank_times import RankFigures
from meshwright.observe.stragglers import Straggler, StragglerWatch


class Steps:
    """Feeds steps of a second each to a watch."""

    def __init__(self, factor: float | None = 1.5) -> None:
        self.now = 0.0
        self.watch = StragglerWatch(factor, clock=lambda: self.now)

    def feed(self, own, waited=None, *, count: int = 12) -> list[Straggler]:
        """The stragglers found in `count` steps with these times."""
        found = []
        for _ in range(count):
            self.now += 1.0
            own_seconds = np.array(own, dtype=np.float64)
            waits = np.zeros_like(own_seconds) if waited is None else np.array(waited)
            found += self.watch.look(RankFigures(own_seconds, waits, np.zeros_like(own_seconds)))
        return found


@pytest.mark.parametrize("num_ranks", [2, 4, 100])
def test_a_slow_rank_is_named_once_with_its_ratio(num_ranks):
    own = [1.0] * num_ranks
    own[1] = 1.8
    steps = Steps()
    assert steps.feed(own, count=11) == [], "not before there are enough observations"
    (found,) = steps.feed(own)
    assert found.rank == 1 and found.ratio == pytest.approx(1.8) and "its own compute" in found.cause
    assert "rank 1 on node7 is a straggler" in found.text("node7") and "1.80 times" in found.text("node7")
    assert steps.feed(own) == [], "it is known"


def test_a_rank_that_waits_for_data_is_told_from_one_that_computes():
    (found,) = Steps().feed([1.0, 2.0, 1.0], [0.1, 0.9, 0.1])
    assert found.rank == 1 and "waits for its batches" in found.cause


def test_a_straggler_that_recovered_is_found_again():
    steps = Steps()
    assert steps.feed([1.0, 2.0]) and not steps.feed([1.0, 1.0])
    assert len(steps.feed([1.0, 2.0])) == 1


def test_no_false_alarm():
    """Noise, a pause of one rank, changing slow ranks, times that are not measured, one rank, and `null`."""
    rng, steps = np.random.default_rng(0), Steps()
    assert not any(steps.feed(rng.uniform(0.8, 1.2, 8), count=1) for _ in range(200))
    assert Steps().feed([1.0, 1.0], count=11) + steps.feed([1.0] * 7 + [50.0], count=2) == []
    alternating = Steps()
    assert not any(alternating.feed(own, count=1) for own in [[1.0, 2.0], [2.0, 1.0]] * 20)
    assert Steps().feed([float("nan"), 1.0]) == Steps().feed([1.0]) == Steps(None).feed([1.0, 9.0]) == []


def test_short_steps_are_averaged_over_a_second():
    steps = Steps()
    for _ in range(100):  # a tenth of a second each
        steps.now -= 0.9
        assert steps.feed([0.1, 0.3], count=1) == []
    assert len(steps.feed([0.1, 0.3], count=3)) == 1
