"""The scalars of metrics.jsonl mirrored for TensorBoard, in `<run>/tensorboard`."""

from pathlib import Path
from typing import TYPE_CHECKING, Self

from meshwright.errors import RunError
from meshwright.observe.metrics import StepMetrics
from meshwright.observe.scalars import tagged_scalars

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter


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
        for tag, value in tagged_scalars(metrics).items():
            self._writer.add_scalar(tag, value, metrics.step)

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
