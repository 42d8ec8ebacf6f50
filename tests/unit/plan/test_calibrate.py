"""The fit of a machine's time factors: exact where it can be, robust where runs disagree."""

import pytest

from meshwright.errors import SpecError
from meshwright.hardware import parse_cluster
from meshwright.hardware.calibration import Calibration
from meshwright.plan.calibrate import MeasuredRun, fit
from meshwright.plan.predict import predict_run
from meshwright.spec.text import read_run

CLUSTER = parse_cluster("h100:8")


def measured(name: str, *overrides: str, truth: Calibration, noise: float = 1.0) -> MeasuredRun:
    """A run whose measured time is its prediction on a machine with these factors."""
    run = read_run("llama-3.1-8b-8gpu", ["compile=true", *overrides]).run
    cluster = truth.applied_to(CLUSTER.with_devices(run.parallel.num_ranks))
    return MeasuredRun(name, run, noise * predict_run(run, cluster).step_seconds)


ONE_RANK = ("parallel.dp_shard=1", "parallel.zero=0")


def test_a_slower_device_is_found() -> None:
    found = fit([measured("a", *ONE_RANK, truth=Calibration(compute=1.3))], CLUSTER)
    assert found.calibration.compute == pytest.approx(1.3, rel=1e-3)
    assert found.before_error == pytest.approx(1 - 1 / 1.3, rel=0.05)
    assert found.after_error < 1e-4
    assert any("one run" in note for note in found.notes)


def test_links_are_told_from_kernels() -> None:
    truth = Calibration(compute=1.1, communication=2.5)
    tp = ("parallel.dp_shard=1", "parallel.zero=0", "parallel.tp=8", "data.batch_sequences=8")
    runs = [measured("one", *ONE_RANK, truth=truth), measured("tp", *tp, truth=truth)]
    found = fit(runs, CLUSTER)
    assert found.calibration.compute == pytest.approx(1.1, rel=0.01)
    assert found.calibration.communication == pytest.approx(2.5, rel=0.05)
    assert found.after_error < 0.01 < found.before_error


def test_one_bad_run_is_dropped_and_moves_nothing() -> None:
    truth = Calibration(compute=1.2)
    noises = (1.0, 1.01, 0.99, 1.02, 3.0)
    runs = [
        measured(f"r{index}", *ONE_RANK, f"data.batch_sequences={8 + index}", truth=truth, noise=noise)
        for index, noise in enumerate(noises)
    ]
    found = fit(runs, CLUSTER)
    assert [each.is_dropped for each in found.runs] == [False, False, False, False, True]
    assert found.calibration.compute == pytest.approx(1.2, rel=0.02)
    assert found.left_out_error is not None and found.left_out_error < 0.03


def test_a_factor_is_bounded_and_says_so() -> None:
    found = fit([measured("a", *ONE_RANK, truth=Calibration(compute=40.0))], CLUSTER)
    assert found.calibration.compute == pytest.approx(4.0)
    assert any("at its bound" in note for note in found.notes)


def test_no_run_is_an_error() -> None:
    with pytest.raises(SpecError, match="no run was measured"):
        fit([], CLUSTER)
