"""Strong and weak scaling: the runs that are measured, and what follows from their times."""

from pathlib import Path

import pytest
from tests.support.runs import tiny_run

from meshwright.bench.comm_charts import comm_charts, scaling_chart
from meshwright.bench.scaling import merged, rank_counts, read_rows, scaled_run, scaling_rows
from meshwright.errors import SpecError, SpecErrors
from meshwright.hardware import cluster_of
from meshwright.spec import ParallelSpec, PrecisionSpec


def run_of(**parallel: int):
    run = tiny_run(parallel=ParallelSpec(**parallel))
    data = run.data.with_(batch_sequences=8, microbatch_sequences=1)
    return run.with_(data=data, precision=PrecisionSpec(compute="bf16"))


def test_strong_scaling_keeps_the_batch_and_weak_scaling_that_of_a_rank():
    run = run_of(dp_shard=4, zero=3)
    strong, weak = scaled_run(run, 2, "strong"), scaled_run(run, 2, "weak")
    assert strong.parallel.dp_shard == weak.parallel.dp_shard == 2 and strong.parallel.zero == 3
    assert (strong.data.batch_sequences, weak.data.batch_sequences) == (8, 4)
    assert scaled_run(run, 8, "weak").data.batch_sequences == 16
    one = scaled_run(run, 1, "strong")
    assert one.parallel.zero == 0 and one.parallel.num_ranks == 1  # one rank has nothing to shard


def test_model_parallel_degrees_stay():
    run = run_of(dp_replicate=4, tp=2)
    assert rank_counts(run) == [2, 4, 8]
    assert scaled_run(run, 2, "strong").parallel == ParallelSpec(tp=2)
    with pytest.raises(SpecError, match="3 ranks are not a multiple of tp x cp x pp = 2"):
        scaled_run(run, 3, "strong")
    with pytest.raises(SpecErrors):
        scaled_run(run, 32, "strong")  # 8 sequences for 16 data-parallel ranks


def test_rows_have_the_efficiency_measured_and_predicted():
    run, cluster = run_of(dp_replicate=2), cluster_of("h100:8")
    first = list(scaling_rows(run, 1, cluster, lambda scaled: 1.0))
    second = list(scaling_rows(run, 2, cluster, lambda scaled: 0.6 * scaled.data.batch_sequences / 8))
    rows = merged(first, second)
    assert [(row["kind"], row["ranks"]) for row in rows] == [
        ("strong", 1),
        ("strong", 2),
        ("weak", 1),
        ("weak", 2),
    ]
    assert rows[1]["efficiency"] == pytest.approx(1 / 1.2)
    assert rows[3]["batch_tokens"] == 2 * rows[2]["batch_tokens"]
    assert 0 < rows[1]["predicted_efficiency"] <= 1.0
    assert "model: strong scaling" in scaling_chart(rows)
    again = merged(rows, [{**rows[1], "seconds": 0.5}])  # a later launch replaces its row
    assert len(again) == 4 and again[1]["efficiency"] == pytest.approx(1.0)


def test_a_batch_that_cannot_be_divided_is_a_line_with_its_error():
    rows = list(scaling_rows(run_of(dp_replicate=2), 16, None, lambda scaled: 1.0))
    assert "error" in rows[0] and "error" not in rows[1]
    assert merged([], rows)[0] == rows[0]


def test_a_folder_of_something_else_is_refused(tmp_path: Path):
    assert read_rows(tmp_path) == []
    (tmp_path / "scaling.json").write_text("[]")
    with pytest.raises(SpecError, match="no result of `bench scaling`"):
        read_rows(tmp_path)


def rows_of(*places: tuple[int, int]) -> list[dict]:
    return [
        {"kind": "all_reduce", "ranks": n, "nodes": nodes, "bytes": size, "bus_gigabytes_per_second": 1.0}
        for n, nodes in places
        for size in (4096, 256_000_000)
    ]


def test_the_curve_over_nodes_has_full_nodes_only():
    charts = comm_charts(rows_of((2, 1), (4, 1), (8, 2), (16, 4)))
    assert "Messages of 256 MB: bus bandwidth by number of nodes" in charts["collectives_by_size"]
    assert "by number of ranks" in comm_charts(rows_of((2, 1), (4, 1)))["collectives_by_size"]
    assert list(comm_charts(rows_of((2, 1)))) == ["collectives"]
    axes = [{**row, "axis": "tp"} for row in rows_of((2, 1))]
    assert list(comm_charts(axes)) == ["collectives_tp"]
    assert comm_charts([{"kind": "all_reduce", "ranks": 2, "error": "no"}]) == {}
