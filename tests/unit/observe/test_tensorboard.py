"""TensorBoard shows the same scalars as metrics.jsonl."""

import warnings
from pathlib import Path

import pytest

from meshwright.observe.metrics import StepMetrics
from meshwright.observe.tensorboard import TensorBoardMirror

pytest.importorskip("tensorboard", reason="needs the train extra")


def a_step(step: int, loss: float, eval_loss: float | None = None) -> StepMetrics:
    return StepMetrics(
        step=step,
        loss=loss,
        grad_norm=1.0,
        lr=1e-3,
        tokens=step * 10,
        step_tokens=10,
        step_seconds=1.0,
        peak_bytes=None,
        eval_loss=eval_loss,
    )


def read_scalars(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    with warnings.catch_warnings():
        # TensorBoard's own reader warns about its dependencies' deprecations; the writer does not.
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        reader = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    tags = reader.Tags()["scalars"]
    return {tag: [(point.step, point.value) for point in reader.Scalars(tag)] for tag in tags}


def test_scalars_are_mirrored_and_a_resume_replaces_what_it_repeats(tmp_path: Path) -> None:
    with TensorBoardMirror(tmp_path) as mirror:
        mirror.write(a_step(1, 4.0))
        mirror.write(a_step(2, 3.0, eval_loss=3.5))
        mirror.write(a_step(3, 99.0))
    with TensorBoardMirror(tmp_path, restored_step=2) as mirror:
        mirror.write(a_step(3, 2.0))
    scalars = read_scalars(tmp_path)
    assert scalars["loss/train"] == [(1, 4.0), (2, 3.0), (3, 2.0)]
    assert scalars["loss/eval"] == [(2, 3.5)]
    assert "speed/mfu" not in scalars
