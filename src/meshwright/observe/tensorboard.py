"""The scalars of metrics.jsonl mirrored for TensorBoard, in `<run>/tensorboard`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from meshwright.errors import RunError
from meshwright.observe.histograms import LOWEST_EXPONENT, Histogram, Histograms
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

    def write_histograms(self, step: int, histograms: Histograms) -> None:
        """Write the exponents (log2 of the magnitude) of every place as a histogram."""
        for place, one in histograms.items():
            layer = "" if place.layer is None else f"/{place.layer:03d}"
            if one.counts.any():
                self._writer.add_histogram_raw(
                    f"{place.kind}/{place.name}{layer}", global_step=step, **_exponents(one)
                )

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _exponents(one: Histogram) -> dict[str, Any]:
    """What TensorBoard wants of a histogram of exponents; a bin's elements count as its middle."""
    used = np.flatnonzero(one.counts)
    counts = one.counts[used[0] : used[-1] + 1]
    first = LOWEST_EXPONENT + int(used[0])
    middles = first + np.arange(len(counts)) + 0.5
    return {
        "min": float(first),
        "max": float(first + len(counts)),
        "num": int(counts.sum()),
        "sum": float((counts * middles).sum()),
        "sum_squares": float((counts * middles**2).sum()),
        # The first bin is empty: TensorBoard draws it from -infinity.
        "bucket_limits": [float(first), *(middles + 0.5).tolist()],
        "bucket_counts": [0, *counts.tolist()],
    }
