"""The line of a run that compares its prediction with what it measured."""

import pytest
import torch
from tests.unit.train.test_record import run_of

from meshwright.hardware.prediction_log import read_pairs
from meshwright.observe import prediction_check
from meshwright.observe.metrics import StepMetrics
from meshwright.observe.prediction_check import DUE_STEPS, PredictionCheck
from meshwright.spec.families import family

CARD = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def own_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("MESHWRIGHT_HOME", str(tmp_path))


def metrics(step: int, seconds: float) -> StepMetrics:
    return StepMetrics(
        step=step,
        loss=1.0,
        grad_norm=1.0,
        lr=1e-3,
        tokens=step,
        step_tokens=1,
        step_seconds=seconds,
        peak_bytes=2**30,
    )


def a_run():
    model = family("llama-3.2-1b")
    return run_of(model=model.model_dump(), precision={"compute": "bf16"})


def test_the_pair_is_reported_once_and_stored(monkeypatch):
    monkeypatch.setattr(prediction_check, "device_title", lambda device: "NVIDIA H200")
    check = PredictionCheck(a_run(), CARD)
    lines = [
        check.after_step(metrics(step, 9.0 if step == 5 else 0.5)) for step in range(5, 5 + DUE_STEPS + 3)
    ]
    reported = [line for line in lines if line is not None]
    assert lines[DUE_STEPS - 1] == reported[0] and len(reported) == 1
    assert reported[0].startswith("predicted ") and reported[0].endswith("; measured 1.0 GiB, 500 ms")
    assert check.report() is None
    (pair,) = read_pairs("h200")
    assert (pair.measured_bytes, pair.measured_seconds, pair.layout) == (2**30, 0.5, "one device")
    assert pair.predicted_bytes > 10 * 2**30  # a billion parameters with AdamW


def test_a_short_run_reports_at_its_end(monkeypatch):
    monkeypatch.setattr(prediction_check, "device_title", lambda device: "NVIDIA H200")
    check = PredictionCheck(a_run(), CARD)
    assert check.after_step(metrics(1, 1.0)) is None
    assert check.report() is not None


def test_a_cpu_reports_what_it_measured():
    check = PredictionCheck(a_run(), torch.device("cpu"))
    check.after_step(metrics(1, 9.0))
    check.after_step(metrics(2, 0.5))
    assert check.report() == "measured 1.0 GiB resident per rank, 500 ms per step; cpu has no prediction"
    assert read_pairs("cpu") == []


def test_a_device_outside_the_catalogue_has_no_prediction(monkeypatch):
    monkeypatch.setattr(prediction_check, "device_title", lambda device: "Acme 9000")
    check = PredictionCheck(a_run(), CARD)
    check.after_step(metrics(1, 0.5))
    assert check.report() == "measured 1.0 GiB per rank, 500 ms per step; Acme 9000 has no prediction"
