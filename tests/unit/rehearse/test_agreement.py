"""The planner's memory against the trace of the same run, on layouts drawn from a printed seed."""

import os
import time

import pytest
from tests.support.memory_agreement import Compared, compare, drawn, kind_of, layout_of, table

from meshwright.plan.memory.margins import memory_margin
from meshwright.plan.workload.formats import runtime_of, workload_of

SEED = 1
COUNT = 12


def check_seed(seed: int, count: int, *, compiled: bool) -> None:
    print(f"seed {seed}, {count} layouts")
    found = [compare(run, at_last=at_last) for run, at_last in drawn(seed, count, compiled=compiled)]
    results = [one for one in found if one is not None]
    print(table(results))
    wrong = [one for one in results if abs(one.error) > _margin(one)]
    assert not wrong, "\n".join(f"{one.error:+.2%} {kind_of(one.run)}: {one.run.parallel}" for one in wrong)


def _margin(one: Compared) -> float:
    found = memory_margin(workload_of(one.run), layout_of(one.run), runtime_of(one.run))
    assert found is not None
    return found.share


def test_uncompiled_layouts_stay_inside_their_margins() -> None:
    check_seed(SEED, COUNT, compiled=False)


@pytest.mark.soak
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_fresh_layouts_stay_inside_their_margins(compiled: bool) -> None:
    check_seed(int(os.environ.get("MESHWRIGHT_SEED", time.time())), 60, compiled=compiled)
