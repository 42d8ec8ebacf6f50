"""Everything the loop works on, for a model of this package and for a user's own module alike."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from meshwright.checkpoint.live import DataPosition
from meshwright.mesh import Mesh
from meshwright.spec import RunSpec
from meshwright.spec.modules import FitSpec
from meshwright.train.fp8_comparison import Fp8Comparison
from meshwright.train.histogram_probe import HistogramProbe
from meshwright.train.noise_scale import HalfBatchGradient
from meshwright.train.step import StepBatch, Training
from meshwright.train.workload import Workload


class PrepareData(Protocol):
    """Called once, before the first batch of a process."""

    def __call__(self, run_dir: Path, *, is_resumed: bool) -> None:
        """Prepare the data of a run in this directory."""
        ...


class CountedBatch(StepBatch, Protocol):
    """A step's batch that knows its size."""

    @property
    def num_positions(self) -> int:
        """Positions of the batch over all ranks: what `tokens` in the metrics counts."""
        ...


class BatchStream(DataPosition, Protocol):
    """Batches in an order that a saved position restores."""

    wait_seconds: float
    """Time that this rank has waited for batches."""

    def __iter__(self) -> Iterator[CountedBatch]: ...

    def __next__(self) -> CountedBatch: ...

    @property
    def is_exhausted(self) -> bool:
        """Whether `max_epochs` leaves no sample."""
        ...

    def read_ahead(self) -> Exception | None:
        """Wait for the next batch, without taking it: its error where it cannot be read; None where it is
        there, at the end of the data, and where batches are read only when they are taken."""
        ...

    def read_again(self) -> None:
        """Read the next batch again, after an error of `read_ahead`."""
        ...

    def close(self) -> None:
        """Stop prefetching batches."""
        ...


@dataclass(frozen=True)
class Job:
    """A run that is built and ready to start on this rank."""

    run: RunSpec | FitSpec
    mesh: Mesh
    training: Training
    batches: BatchStream
    workload: Workload
    load_initial_weights: Callable[[], None]
    """Loads the weights to start from, where the run names some; called where there is no checkpoint."""
    evaluate: Callable[[], float]
    """Loss on held-out data; all ranks call it."""
    prepare_data: PrepareData | None = None
    """Computes or reads what batches need from the weights at the start of the run; all ranks call it."""
    measure_half_batch: Callable[[Any], HalfBatchGradient] | None = None
    """The gradient of half of a batch, for the noise scale; all ranks call it. None for users' modules."""
    fp8_comparison: Fp8Comparison | None = None
    """Compares fp8 gradients with bf16 ones, where the run is in fp8."""
    histograms: HistogramProbe | None = None
    """Counts magnitudes of activations and gradients, where the run wants histograms."""
    load_base: Callable[[], None] | None = None
    """Loads the frozen base, where checkpoints have adapters alone; called before they are restored."""
