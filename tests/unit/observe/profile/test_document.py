"""The document of a profile, and what is written from it: terminal, page, pipeline."""

import io
import json
from typing import Any

import pytest
from rich.console import Console
from tests.support.traces import document, h200_document, kernel, named, step
from tests.unit.observe.profile.test_changes import H200, run_of

from meshwright.observe.profile.changes import Situation
from meshwright.observe.profile.document import ProfiledOn, RankResult, profile_document
from meshwright.observe.profile.lanes import merged, step_lanes
from meshwright.observe.profile.page import profile_page
from meshwright.observe.profile.pictures import pipeline_svg
from meshwright.observe.profile.pieces import pieces_of
from meshwright.observe.profile.pipeline_timeline import (
    RankActions,
    action_name,
    measured_actions,
    timeline_document,
)
from meshwright.observe.profile.rank_profile import Recorded, rank_profile
from meshwright.observe.profile.terminal import print_profile
from meshwright.observe.profile.trace import read_trace
from meshwright.spec import ParallelSpec


def result(width: int, *, rank: int = 0, step_seconds: float = 0.0152) -> RankResult:
    trace = read_trace(h200_document(width=width))
    profile = rank_profile(trace, Recorded(step_seconds=step_seconds, data_seconds=1e-4))
    lanes = step_lanes(trace, pieces_of(trace))
    return RankResult(rank, profile, step_seconds, 90 * 2**30, lanes)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    run = run_of("model.width=2049")
    results = [result(2048, step_seconds=0.006), result(2049, rank=1)]
    situation = Situation(run, results[1].profile, H200)
    on = ProfiledOn("NVIDIA H200", "2.11.0", "6,1,2", H200)
    return profile_document(results, run, on, situation)


def test_the_busiest_rank_is_shown_and_named(found: dict[str, Any]) -> None:
    assert found["rank"] == 1 and [row["rank"] for row in found["ranks"]] == [0, 1]
    assert any(line.startswith("Rank 1 computes") for line in found["verdict"])


def test_the_verdict_names_the_misaligned_head(found: dict[str, Any]) -> None:
    (line,) = [one for one in found["verdict"] if "8192 x 2049 x 32064" in one]
    assert "in bf16" in line and "no multiple of 16" in line and "would save" in line
    assert found["changes"][0]["overrides"] == "model.width=2112"
    assert found["mfu"] == pytest.approx(found["flops_per_second_per_device"] / 989e12, rel=0.01)


def test_the_document_is_json(found: dict[str, Any]) -> None:
    assert json.loads(json.dumps(found, allow_nan=False))["version"] == 1


def test_the_terminal_report_has_every_part(found: dict[str, Any]) -> None:
    console = Console(record=True, width=120, file=io.StringIO())
    print_profile(found, console)
    text = console.export_text()
    for part in ("most worth trying", "model.width=2112", "where a step of", "kernels by class", "ranks"):
        assert part in text
    assert "matmuls without the full rate of tensor cores" in text


def test_the_page_is_complete_and_loads_nothing(found: dict[str, Any]) -> None:
    page = profile_page(found, None)
    assert page.count("<svg") >= 3 and "model.width=2112" in page and "prefers-color-scheme: dark" in page
    assert "http://" not in page.replace("http://www.w3.org", "") and "<script" not in page


def test_neighbours_of_one_class_are_one_span() -> None:
    spans = [("matmul", 0.0, 1.0), ("matmul", 1.05, 2.0), ("copy", 2.0, 2.01), ("matmul", 5.0, 6.0)]
    assert merged(spans, 0.1) == [("matmul", 0.0, 2.0), ("matmul", 5.0, 6.0)]


def pipeline_rank(rank: int, late: float) -> RankActions:
    """Stage `rank` of 1f1b with two micro-batches; forwards take 100 and backwards 200 microseconds."""
    order = (
        [("F", 0), ("F", 1), ("B", 0), ("B", 1)] if rank == 0 else [("F", 0), ("B", 0), ("F", 1), ("B", 1)]
    )
    starts = [0.0, 100.0, 500.0, 800.0] if rank == 0 else [100.0, 200.0, 400.0, 500.0]
    ranges = [
        named(action_name(kind, rank, microbatch), start + late, 100.0 if kind == "F" else 200.0)
        for (kind, microbatch), start in zip(order, starts, strict=True)
    ]
    found = measured_actions(
        read_trace(document(step(late, 2000), *ranges, origin_nanoseconds=10**18)), rank=rank, pp_rank=rank
    )
    assert found is not None
    return found


def test_measured_actions_stand_beside_the_schedule() -> None:
    parallel = ParallelSpec(pp=2, schedule="1f1b")
    found = timeline_document([pipeline_rank(1, 5.0), pipeline_rank(0, 5.0)], parallel, 2)
    assert found is not None
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    assert found["ranks"][0]["measured"][0] == ["F", 0, 0, 0.0, pytest.approx(1e-4, abs=1e-6)]
    # Without messages: 100 + 3 x 200 + 2 x 100 on the last rank, then the last backward of the first.
    assert found["predicted_seconds"] == pytest.approx(9e-4, abs=1e-6)
    assert found["measured_seconds"] == pytest.approx(1e-3, abs=1e-6)
    assert len(found["ranks"][1]["predicted"]) == 4
    drawing = pipeline_svg(found)
    assert "measured" in drawing and "predicted" in drawing and "micro-batch 1" in drawing


def test_on_a_device_an_action_is_its_kernels_without_communication() -> None:
    events = document(
        step(0, 2000),
        named(action_name("F", 0, 3), 100, 50),
        kernel("nvjet_tst_64x64", 400, 100, launched_at=110),
        kernel("triton_poi_fused_0", 550, 50, launched_at=120),
        kernel("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 600, 500, launched_at=130),
        kernel("nvjet_tst_64x64", 1200, 100, launched_at=200),
    )
    found = measured_actions(read_trace(events), rank=0, pp_rank=0)
    assert found is not None
    (timed,) = found.actions
    assert timed.action == ("F", 0, 3)
    assert (timed.start, timed.end) == (pytest.approx(4e-4), pytest.approx(6e-4))
