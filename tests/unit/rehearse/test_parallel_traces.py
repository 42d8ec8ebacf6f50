"""Traces made in parallel processes equal those made in this one."""

import pytest
from tests.unit.rehearse.test_trace import small_run

from meshwright.errors import SpecError
from meshwright.rehearse import extrapolate, parallel_traces
from meshwright.rehearse.parallel_traces import rehearse_ranks
from meshwright.rehearse.rank_report import RankReport, rehearse_rank
from meshwright.spec import RunSpec


def run_of(**changes: object) -> RunSpec:
    run = small_run({"pp": 2}, num_layers=8, microbatches=2, compute="bf16")
    return run.with_(**changes)


def figures(report: RankReport) -> dict[str, object]:
    return {**vars(report), "seconds": None}


def test_reports_of_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_traces, "MIN_WORK_FOR_PROCESSES", 0)
    monkeypatch.setattr(parallel_traces, "usable_cores", lambda: 2)
    lines: list[str] = []
    monkeypatch.setattr(extrapolate, "MIN_WORK", 0)
    first, last = rehearse_ranks(run_of(), [0, 1], log=lines.append)
    assert figures(last) == figures(rehearse_rank(run_of(), 1))
    assert first.num_traces == last.num_traces == 3
    assert first.rank == 0 and first.items != last.items
    assert "in 2 processes" in lines[0]
    assert lines[-1] == f"trace {(count := first.num_traces + last.num_traces)} of {count}"


def test_an_error_in_a_worker_process_is_raised_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_traces, "MIN_WORK_FOR_PROCESSES", 0)
    monkeypatch.setattr(parallel_traces, "usable_cores", lambda: 2)
    monkeypatch.setattr(extrapolate, "MIN_WORK", 0)  # several traces, so that there are processes
    run = run_of(parallel={"dp_shard": 2, "zero": 3}, memory={"offload": "optimizer,parameters"})
    with pytest.raises(SpecError, match="cannot tell shards") as refused:
        rehearse_ranks(run, [0])
    assert refused.value.where == "memory.offload"
