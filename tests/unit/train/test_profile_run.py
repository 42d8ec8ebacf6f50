"""A profile of several ranks: the figures of each, and the measured pipeline beside its schedule."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.equivalence import this_world
from tests.support.runs import tiny_run
from tests.support.soak import soak

from meshwright.observe.profile.steps import ProfileSteps
from meshwright.plan.workload.schedules import PipelineShape, actions
from meshwright.rehearse.rank_pool import RankPool
from meshwright.spec import ParallelSpec, RunSpec
from meshwright.train.profile_run import profile_in_world


def profile_here(run: RunSpec, folder: Path) -> dict[str, Any] | None:
    steps = ProfileSteps(wait=0, warmup=1, active=1)
    return profile_in_world(run, this_world(), folder, steps, frozenset({1}), with_stacks=False)


@pytest.mark.parametrize(("schedule", "virtual_stages"), [soak("1f1b", 1), ("zbv", 2)])
def test_a_pipeline_is_drawn_beside_its_schedule(
    ranks: RankPool, tmp_path: Path, schedule: Any, virtual_stages: int
) -> None:
    parallel = ParallelSpec(pp=2, schedule=schedule, virtual_stages=virtual_stages)
    run = tiny_run(parallel=parallel)
    run = run.with_(model=run.model.with_(num_layers=4))
    document, other = ranks.run(profile_here, 2, run, tmp_path)
    assert document is not None and other is None
    assert [row["rank"] for row in document["ranks"]] == [0, 1]
    assert document["communication_seconds"] > 0
    timeline = json.loads((tmp_path / "timeline.json").read_text())
    shape = PipelineShape(2, virtual_stages, run.accumulation)
    for rank, order in zip(timeline["ranks"], actions(schedule, shape), strict=True):
        measured = [tuple(row[:3]) for row in rank["measured"]]
        assert measured == [tuple(action) for action in order]
        assert [tuple(row[:3]) for row in rank["predicted"]] == measured
        assert all(0.0 <= row[3] < row[4] for row in rank["measured"])
    assert timeline["predicted_seconds"] > 0 and timeline["measured_seconds"] > 0
    assert "<svg" in (tmp_path / "timeline.svg").read_text()
    assert {path.name for path in tmp_path.glob("*.gz")} == {"trace-rank1.json.gz"}
