"""The planner's memory against the trace of the same run, on layouts drawn from a printed seed."""

import os
import time

import pytest
from tests.support.memory_agreement import Compared, compare, drawn, kind_of, layout_of, table

from meshwright.plan.memory.margins import memory_margin
from meshwright.plan.workload.formats import runtime_of, workload_of

SEED = 20261116
COUNT = 24
MEAN_ERROR = 0.015
STATE = ("weights", "master", "optimizer")
"""Items that a trace has to the byte, whatever the phase."""


def check_seed(seed: int, count: int, *, compiled: bool) -> list[Compared]:
    print(f"seed {seed}, {count} layouts")
    found = [compare(run, at_last=at_last) for run, at_last in drawn(seed, count, compiled=compiled)]
    results = [one for one in found if one is not None]
    print(table(results))
    wrong = [one for one in results if abs(one.error) > _margin(one)]
    assert not wrong, "\n".join(f"{one.error:+.2%} {kind_of(one.run)}: {one.run.parallel}" for one in wrong)
    return results


def _margin(one: Compared) -> float:
    found = memory_margin(workload_of(one.run), layout_of(one.run), runtime_of(one.run))
    assert found is not None
    return found.share


def test_uncompiled_layouts_agree_with_the_trace() -> None:
    results = check_seed(SEED, COUNT, compiled=False)
    assert sum(abs(one.error) for one in results) / len(results) <= MEAN_ERROR
    for one in results:
        predicted, traced = (
            sum(items.get(name, 0.0) for name in STATE) for items in (one.predicted, one.traced)
        )
        assert predicted == pytest.approx(traced, rel=0.003)


@pytest.mark.soak
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_fresh_layouts_stay_inside_their_margins(compiled: bool) -> None:
    check_seed(int(os.environ.get("MESHWRIGHT_SEED", time.time())), 60, compiled=compiled)
