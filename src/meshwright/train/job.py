"""Everything the loop works on, whoever brought the model and the data."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from meshwright.checkpoint.live import Resumable
from meshwright.mesh import Mesh
from meshwright.spec import RunSpec
from meshwright.spec.modules import FitSpec
from meshwright.train.fp8_shadow import Shadow
from meshwright.train.noise_scale import PartGradient
from meshwright.train.step import StepBatch, Training


class CountedBatch(StepBatch, Protocol):
    """A step's batch that knows its size."""

    @property
    def num_positions(self) -> int:
        """Over all ranks: what `tokens` in the metrics counts."""
        ...


class BatchStream(Resumable, Protocol):
    """Batches in an order that a saved position brings back."""

    def __iter__(self) -> Iterator[CountedBatch]: ...

    def __next__(self) -> CountedBatch: ...

    def close(self) -> None:
        """Stop making batches ahead."""
        ...


@dataclass(frozen=True)
class Workload:
    """How large the work is; None where nobody knows."""

    num_parameters: int
    flops_per_token: float | None
    entropy: Callable[[], float | None]
    """Nats per token of the data without context."""
    counted: str = "tokens"
    """What the positions of a batch are called."""


@dataclass(frozen=True)
class Job:
    """A run that is ready to start on this rank."""

    run: RunSpec | FitSpec
    mesh: Mesh
    training: Training
    batches: BatchStream
    workload: Workload
    load_initial: Callable[[], None]
    """Weights to start from, where the run names some; called when there is no checkpoint to go on from."""
    evaluate: Callable[[], float]
    """Loss on held-out data; all ranks call it."""
    measure_part: Callable[[Any], PartGradient] | None = None
    """The gradient of a part of a batch, for the noise scale; all ranks call it. None for other modules."""
    shadow: Shadow | None = None
    """fp8 beside bf16, where the run is in fp8."""
