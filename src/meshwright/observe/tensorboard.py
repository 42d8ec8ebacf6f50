"""The scalars of metrics.jsonl mirrored for TensorBoard, in `<run>/tensorboard`."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Self

from meshwright.errors import RunError
from meshwright.observe.metrics import StepMetrics

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter

_GROUP = {
    "loss": "loss/train",
    "eval_loss": "loss/eval",
    "aux_loss": "loss/aux",
    "grad_norm": "optimizer/grad_norm",
    "lr": "optimizer/lr",
    "loss_scale": "optimizer/loss_scale",
    "skipped": "optimizer/skipped",
    "noise_scale_tokens": "optimizer/noise_scale_tokens",
    "tokens": "speed/tokens",
    "step_seconds": "speed/step_seconds",
    "tokens_per_second": "speed/tokens_per_second",
    "tflops_per_gpu": "speed/tflops_per_gpu",
    "mfu": "speed/mfu",
    "peak_bytes": "memory/peak_bytes",
    "expert_load_max": "experts/load_max",
    "expert_load_min": "experts/load_min",
}


def _open_writer(log_dir: Path, restored_step: int) -> "SummaryWriter":
    """The one place that imports TensorBoard, which takes a second that most runs need not spend."""
    try:
        from torch.utils.tensorboard.writer import SummaryWriter  # noqa: PLC0415
    except ImportError as error:
        raise RunError(
            f"TensorBoard cannot be loaded: {error}",
            where="observe.tensorboard",
            hint='pip install "meshwright[train]", or set observe.tensorboard=false',
        ) from error
    # A resumed run replaces the points after the restored step.
    return SummaryWriter(str(log_dir), purge_step=restored_step + 1 if restored_step else None)


class TensorBoardMirror:
    """Writes each step's scalars; rank 0 makes one when `observe.tensorboard` is set. Use as a context."""

    def __init__(self, run_dir: Path | str, *, restored_step: int = 0) -> None:
        self._writer = _open_writer(Path(run_dir) / "tensorboard", restored_step)

    def write(self, metrics: StepMetrics) -> None:
        """Write all figures of this step that are not None."""
        values = asdict(metrics)
        for name, tag in _GROUP.items():
            if values[name] is not None:
                self._writer.add_scalar(tag, float(values[name]), metrics.step)

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
