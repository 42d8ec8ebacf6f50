"""A resumed run on preference pairs compares with the reference of its start, on another mesh too."""

from pathlib import Path

import pytest
from tests.support.pairs import expected_training, pair_run
from tests.support.run_directories import attempt

from meshwright.errors import MeshwrightError
from meshwright.observe.metrics import read_metrics
from meshwright.rehearse.rank_pool import RankFailure
from meshwright.spec import ParallelSpec, PreferenceSpec

DPO = PreferenceSpec(beta=0.5)


def test_a_resume_keeps_the_reference(ranks, tmp_path: Path):
    run = pair_run(DPO, ParallelSpec(dp_replicate=2))
    first = attempt(ranks, run, tmp_path, stop_after=1)
    second = attempt(ranks, run.with_(parallel=ParallelSpec(tp=2)), tmp_path)
    losses, _, _ = expected_training(run, [*first.sample_ids, *second.sample_ids])
    rows = read_metrics(tmp_path)
    assert [row["loss"] for row in rows] == pytest.approx(losses, rel=1e-9)
    assert rows[0]["reward_margin"] == pytest.approx(0.0, abs=1e-12)
    assert all(0 <= row["reward_accuracy"] <= 1 for row in rows)


def test_a_resume_without_the_reference_is_refused(ranks, tmp_path: Path):
    run = pair_run(DPO)
    attempt(ranks, run, tmp_path, stop_after=1)
    (tmp_path / "reference.npy").unlink()
    with pytest.raises((RankFailure, MeshwrightError), match="this run has no reference log-probs"):
        attempt(ranks, run, tmp_path)


def test_a_resume_with_a_loss_that_needs_a_reference_is_refused(ranks, tmp_path: Path):
    attempt(ranks, pair_run(PreferenceSpec(loss="simpo")), tmp_path, stop_after=1)
    with pytest.raises((RankFailure, MeshwrightError), match="began with a loss that has no reference"):
        attempt(ranks, pair_run(DPO), tmp_path)
