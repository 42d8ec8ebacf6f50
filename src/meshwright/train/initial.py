"""Initial weights from somewhere else, each rank reading only its own part."""

from meshwright.spec import RunSpec
from meshwright.train.step import Training


def load_initial_weights(run: RunSpec, training: Training) -> None:
    """Weights from `checkpoint.start_from`; without it the model keeps its random start."""
    if run.checkpoint.start_from is None:
        return
    raise NotImplementedError
