"""A plan as JSON, as a run file with its rank map, and as short text."""

import json

import pytest
from tests.support.plans import planned, small_plan

from meshwright.plan.draw.document import compute_optimal, plan_document, rank_map, run_file
from meshwright.plan.draw.rank_map import coordinates
from meshwright.plan.explain.failures import with_checkpoints
from meshwright.plan.explain.neighbours import neighbours
from meshwright.plan.explain.reasons import explain
from meshwright.plan.search.candidate import layout_text
from meshwright.spec.parallel import ParallelSpec
from meshwright.spec.text import parse_run


def test_run_file_reads_back_equal_with_its_rank_map() -> None:
    plan = planned("llama-3.1-70b", "dgx-h100:8")
    text = run_file(plan, explain(plan))
    assert parse_run(text).require_valid() == with_checkpoints(plan)
    assert "#   node 7: ranks 56 to 63" in text


def test_rank_map_of_the_affinity_figure() -> None:
    """2 nodes x 8 devices, tp 2, pp 4, dp 2: neighbours on tp are neighbours on the node."""
    parallel = ParallelSpec(tp=2, pp=4, dp_replicate=2)
    assert [coordinates(parallel, rank)["tp"] for rank in range(4)] == [0, 1, 0, 1]
    last = coordinates(parallel, 15)
    assert (last["pp"], last["dp_replicate"], last["tp"]) == (3, 1, 1)
    assert rank_map(parallel, 8)[1] == "  node 0: ranks 0 to 7: pp 0 to 1, dp_replicate 0 to 1, tp 0 to 1"


def test_layout_text() -> None:
    assert layout_text(small_plan().best.run).startswith("dp_replicate=8 micro=")


def test_document_is_complete_json() -> None:
    plan = small_plan()
    document = plan_document(plan, tokens=10**12, assumed=(), why=["x"], neighbours=neighbours(plan))
    again = json.loads(json.dumps(document))
    assert again["best"]["fits"] is True
    assert again["best"]["days"] == pytest.approx(plan.best.days(10**12))
    assert again["fingerprint"] == with_checkpoints(plan).fingerprint()
    assert len(again["neighbours"]) > 3


def test_compute_optimal_spends_the_budget_at_20_tokens_per_parameter() -> None:
    size, tokens = compute_optimal(6 * 70e9 * 1.4e12)
    assert size == pytest.approx(70e9)
    assert tokens == pytest.approx(1.4e12)
