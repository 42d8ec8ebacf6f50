"""Predictions against published tables: the bands that the accuracy page claims."""

import math

import numpy as np
import pytest
from bench import accuracy, calibrate, mission
from bench.our_runtime import measured_run, our_runtime_table
from bench.vtrain import vtrain_groups

from meshwright.hardware import parse_cluster
from meshwright.plan.framework import our_runtime
from meshwright.plan.predict import predict_run
from meshwright.plan.time.interval import KINDS, interval_source
from meshwright.plan.workload.workload import Workload
from meshwright.spec.families import family


@pytest.fixture(scope="module")
def rows() -> list[accuracy.Priced]:
    return accuracy.load()[0]


@pytest.mark.parametrize("row", mission.gpt3_table(), ids=lambda row: row.label)
def test_gpt3_days_to_the_printed_digit(row: mission.Compared) -> None:
    assert round(row.predicted, 1) == row.published


@pytest.mark.parametrize("row", mission.megatron_table(), ids=lambda row: row.label)
def test_megatron_tflops_within_a_tenth(row: mission.Compared) -> None:
    assert row.ratio == pytest.approx(1.0, abs=0.10)


@pytest.mark.parametrize("row", mission.leonardo_table()[:-1], ids=lambda row: row.label)
def test_leonardo_ratios_within_twelve_percent(row: mission.Compared) -> None:
    """All but the 70B row, whose sequence, micro-batch and recompute are not stated."""
    assert row.ratio == pytest.approx(1.0, abs=0.12)


def test_leonardo_falls_as_devices_grow_at_one_batch() -> None:
    eight_billion = [row.predicted for row in mission.leonardo_table()[:8] if "micro-batch 1" in row.label]
    assert eight_billion == sorted(eight_billion, reverse=True)
    assert eight_billion[-1] < 0.55


@pytest.mark.parametrize("row", mission.fine_tuning_table(), ids=lambda row: row.label)
def test_fine_tuning_scaling_within_a_tenth(row: mission.Compared) -> None:
    assert row.ratio == pytest.approx(1.0, abs=0.10)


def test_llama_70b_fine_tuning_runs_out_of_memory_on_three_devices() -> None:
    assert not mission.fine_tuning_fits(3)
    assert mission.fine_tuning_fits(4)


@pytest.mark.parametrize("row", mission.duration_table(), ids=lambda row: row.label)
def test_durations_are_about_the_printed(row: mission.Compared) -> None:
    """300 B tokens at 140 TFLOP/s per GPU; printed digits are rounded."""
    assert row.ratio == pytest.approx(1.0, abs=0.035)


def test_dense_rows_of_ampere_and_hopper(rows: list[accuracy.Priced]) -> None:
    errors = [abs(row.ratio - 1.0) for row in rows if row.is_target and row.measured is not None]
    assert len(errors) > 120
    assert np.median(errors) <= 0.05
    assert np.quantile(errors, 0.9) <= 0.20


def test_dense_rows_with_their_source_left_out(rows: list[accuracy.Priced]) -> None:
    errors = [abs(row.left_out - 1.0) for row in rows if row.is_target and row.left_out is not None]
    assert np.median(errors) <= 0.08
    assert np.quantile(errors, 0.9) <= 0.20


def test_routed_rows(rows: list[accuracy.Priced]) -> None:
    errors = [abs(row.ratio - 1.0) for row in rows if row.is_routed and row.measured is not None]
    assert np.median(errors) <= 0.10


@pytest.mark.parametrize("kind", KINDS)
def test_intervals_hold_nine_of_ten_left_out_times_of_every_kind(kind: str) -> None:
    """Constants and widths both come from other sources than the row's."""
    count, inside, half_width, median, _ = accuracy.coverage()[kind]
    assert count >= 20
    assert 0.85 <= inside <= 0.95
    assert half_width <= 0.4
    assert median <= 0.10


def test_committed_widths_are_those_of_the_left_out_times() -> None:
    interval = our_runtime().interval
    for kind in KINDS:
        times = [calibrate.LeftOut(0, "", kind, t.ratio) for t in accuracy.left_out_times() if t.kind == kind]
        assert getattr(interval, kind) == pytest.approx(calibrate.width(times), abs=0.002)


def test_deepseek_v3_in_fp8_with_overlapped_all_to_alls() -> None:
    """2.664 M GPU-hours of H800 for 14.8 T tokens, with nothing fitted on it."""
    as_published, in_bf16 = mission.deepseek_table()
    assert as_published.ratio == pytest.approx(1.0, abs=0.1)
    assert in_bf16.predicted < 0.8 * as_published.predicted


def test_a_large_microbatch_explains_the_70b_row_of_leonardo() -> None:
    near = [row.label for row in mission.leonardo_what_if() if abs(row.ratio - 1.0) < 0.1]
    assert near == ["micro-batch 16, 1 stage(s) per rank"]


def test_our_runtime_says_whether_it_was_measured() -> None:
    dense = Workload(family("llama-3.2-1b"), 4096)
    alone = interval_source(dense, parse_cluster("h200:1"), 1)
    assert "measured on one H200" in alone
    assert "ours was not measured" in interval_source(dense, parse_cluster("h100:16"), 16)
    assert "several nodes" in interval_source(dense, parse_cluster("h100:16"), 16)
    assert "Blackwell" in interval_source(dense, parse_cluster("b200:1"), 1)
    routed = interval_source(Workload(family("qwen3-30b-a3b"), 4096), parse_cluster("h200:1"), 1)
    assert "MoE" in routed


def test_memory_of_published_rows(rows: list[accuracy.Priced]) -> None:
    found = accuracy.memory_errors(rows)
    assert len(found) >= 20
    assert np.median([abs(reserved - 1.0) for _, reserved, _ in found]) <= 0.05


def test_no_published_out_of_memory_is_called_fitting(rows: list[accuracy.Priced]) -> None:
    failed = [row for row in rows if "; OOM" in row.cells["notes"]]
    assert len(failed) == 2
    assert not any(row.found.fits for row in failed)


def test_layouts_are_ranked_as_measured() -> None:
    groups = vtrain_groups()
    assert len(groups) == 24
    assert sum(len(group.measured) for group in groups) == 1440
    assert min(group.spearman for group in groups) >= 0.95
    assert max(group.regret for group in groups) <= 0.03


def test_the_cliffs_are_there(rows: list[accuracy.Priced]) -> None:
    """ZeRO-3 alone at small micro-batches, tp past the node, small models on 64 nodes: slow as published."""
    by_line = {row.line: row for row in rows}
    for line in (16, 17, 18, 225, 226, 239):
        assert abs(math.log(by_line[line].ratio)) < math.log(1.35), line


def test_our_own_runtime_as_measured() -> None:
    rows = our_runtime_table()
    assert len(rows) >= 12
    assert np.median([abs(row.time_ratio - 1.0) for row in rows]) <= 0.08
    allocated = [row.allocated_ratio for row in rows if row.allocated_ratio is not None]
    assert np.median([abs(ratio - 1.0) for ratio in allocated]) <= 0.03
    assert (
        np.median([abs(row.reserved_ratio - 1.0) for row in rows if row.reserved_ratio is not None]) <= 0.05
    )
    # Nothing is called smaller than it is by more than a tenth.
    assert min(allocated) > 0.9


def test_separate_documents_gain_what_was_measured() -> None:
    """Tokens per second of separate over joined documents: 1.05 for 1B and 1.07 for 8 layers of 8B."""
    rows = {row.label: row for row in our_runtime_table()}
    pairs = [(row, rows[label.removesuffix(", separate documents")]) for label, row in rows.items()]
    pairs = [(separate, joined) for separate, joined in pairs if separate is not joined]
    assert len(pairs) == 3
    for separate, joined in pairs:
        assert separate.time_ratio == pytest.approx(joined.time_ratio, rel=0.02)


@pytest.mark.parametrize(
    ("fp8", "microbatches", "measured_teraflops"),
    [
        ({}, 1, 466),
        ({}, 4, 500),
        ({"experts": True, "cast_weights": "per_step"}, 1, 421),
        ({"experts": True, "cast_weights": "per_step"}, 4, 465),
    ],
)
def test_experts_in_fp8_cost_what_was_measured(
    fp8: dict[str, object], microbatches: int, measured_teraflops: float
) -> None:
    """Four layers of Qwen3-30B-A3B on one H200: docs/decisions/2026-11-16-fp8-experts.md."""
    row = {"family": "qwen3-30b-a3b", "num_layers": 4, "microbatch_sequences": 4, "sequence_length": 4096}
    row |= {"accumulation": microbatches, "recompute": "none", "compile": True, "weights": "bf16_exact"}
    row |= {"gradients": "bf16", "moments": "bf16", "fp8": {"bf16_layers_each_end": 0, **fp8}}
    found = predict_run(measured_run(row), parse_cluster("h200:1"))
    assert found.tflops_per_device == pytest.approx(measured_teraflops, rel=0.03)
