"""Checkpoints: when they are saved, how many are kept, and the initial weights of a run."""

from meshwright.spec.base import Positive, Spec


class CheckpointSpec(Spec):
    """By default only the final state is saved."""

    every_steps: Positive | None = None
    """Steps between checkpoints; null saves only at the end."""
    keep_last: Positive = 2
    """Checkpoints of this run that are kept; older ones are deleted once a newer one is complete."""
    start_from: str | None = None
    """Initial weights: a Hugging Face folder, a checkpoint, or a run directory. Optimizer, step and data
    start from zero."""
