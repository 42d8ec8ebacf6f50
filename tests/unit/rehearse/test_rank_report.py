"""Figures of a long step extrapolated from truncated traces, and what is refused."""

import pytest
from tests.support.soak import soak
from tests.unit.rehearse.test_trace import small_run

from meshwright.errors import MeshError, PlanError
from meshwright.hardware import parse_cluster
from meshwright.rehearse import extrapolate
from meshwright.rehearse.fits_device import require_fit
from meshwright.rehearse.rank_report import ranks_to_rehearse, rehearse_rank
from meshwright.spec import ParallelSpec


@pytest.mark.parametrize(
    ("parallel", "layers", "microbatches"),
    [
        # Two numbers of layers, two of micro-batches.
        ({"dp_shard": 4, "zero": 3}, 5, 4),
        soak({"pp": 2, "tp": 2}, 10, 3),
        # Micro-batches between those that fill the pipeline and those that drain it.
        ({"pp": 2, "schedule": "zbv", "virtual_stages": 2}, 4, 12),
    ],
)
def test_truncated_traces_give_the_full_step_exactly(parallel, layers, microbatches, monkeypatch):
    monkeypatch.setattr(extrapolate, "MIN_WORK", 0)
    run = small_run(parallel, num_layers=layers, microbatches=microbatches, compute="bf16")
    # One step, since the first has the peak of the third, as test_trace shows.
    short, whole = (rehearse_rank(run, 0, num_steps=1, extrapolate=one) for one in (True, False))
    assert short.num_traces > 1 == whole.num_traces
    assert short.items == whole.items
    assert short.peak_phase == whole.peak_phase
    assert short.collectives == whole.collectives
    assert short.flops == whole.flops
    # Fragmentation depends on the order of all allocations: two segments of the small pool; segments of
    # fixed sizes are never split into smaller ones, so that one more of them (2 or 20 MiB) may be reserved.
    assert abs(short.reserved_bytes - whole.reserved_bytes) <= 4 * 2**20
    assert abs(short.reserved_default_bytes - whole.reserved_default_bytes) <= 24 * 2**20


def test_first_middle_and_last_stage_by_default():
    assert ranks_to_rehearse(ParallelSpec(pp=4, tp=2, dp_replicate=2)) == [0, 8, 12]
    assert ranks_to_rehearse(ParallelSpec(tp=8)) == [0]


def test_a_rank_outside_the_world():
    with pytest.raises(MeshError, match="rank 9 is outside"):
        rehearse_rank(small_run({}), 9)


def test_what_does_not_fit_is_refused_with_bytes_and_changes():
    run = small_run({"dp_shard": 4, "zero": 1}, num_layers=2, compute="bf16")
    report = rehearse_rank(run, 0, num_steps=1)
    require_fit(run, [report], parse_cluster("h100:4"))
    large = report.__class__(**{**report.__dict__, "reserved_bytes": 10.0**12})
    with pytest.raises(PlanError, match="rank 0 needs") as refused:
        require_fit(run, [large], parse_cluster("h100:4"))
    assert "GiB too many" in refused.value.hint
