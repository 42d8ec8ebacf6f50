"""How many devices meet a deadline."""

from dataclasses import replace

import pytest
from tests.support.plans import asked

from meshwright.errors import PlanError
from meshwright.hardware.catalogue import parse_cluster
from meshwright.plan.make_plan import make_plan
from meshwright.plan.search.sizing import seconds_allowed, size_for_deadline

DAY = 86400.0


def test_deadline_gives_the_smallest_cluster_that_meets_it() -> None:
    question = asked("llama-3.1-8b", "h100").question
    sized = size_for_deadline(question, tokens=10**12, deadline_seconds=30 * DAY, open_ended=True)
    allowed = seconds_allowed(question, tokens=10**12, deadline_seconds=30 * DAY)
    assert make_plan(sized).best.step_seconds <= allowed
    smaller = replace(sized, cluster=parse_cluster("h100").with_devices(sized.cluster.num_devices - 8))
    assert make_plan(smaller).best.step_seconds > allowed


def test_an_impossible_deadline_says_what_is_possible() -> None:
    question = asked("llama-3.1-8b", "h100:8").question
    with pytest.raises(PlanError, match=r"at best .* on 8 x"):
        size_for_deadline(question, tokens=10**12, deadline_seconds=DAY, open_ended=False)
