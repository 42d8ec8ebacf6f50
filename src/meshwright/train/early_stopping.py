"""Early stopping: a run ends when its evaluation loss no longer falls.

The evaluation loss is the same number on every rank, and the counts are part of the state that checkpoints
have, so all ranks and all sessions of a run decide alike.
"""

from meshwright.spec.observe import ObserveSpec
from meshwright.train.state import TrainState


def min_delta(observe: ObserveSpec) -> float:
    """How far below the lowest loss a lower one has to be."""
    stopping = observe.evaluate.early_stopping if observe.evaluate else None
    return stopping.min_delta if stopping else 0.0


def has_stopped_early(observe: ObserveSpec, state: TrainState) -> bool:
    """Whether the last evaluation was one too many without a lower loss."""
    stopping = observe.evaluate.early_stopping if observe.evaluate else None
    return stopping is not None and state.evaluations_without_gain >= stopping.patience
