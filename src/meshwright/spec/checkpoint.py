"""Checkpoints: when they are saved, how many are kept, and the initial weights of a run."""

from meshwright.spec.base import Positive, Spec


class CheckpointSpec(Spec):
    """By default only the final state is saved."""

    every_steps: Positive | None = None
    """Steps between checkpoints; null saves only at the end."""
    asynchronous: bool = True
    """Write in the background (async checkpointing): training waits only for the copy to host memory, which
    takes as many bytes as the rank writes. false: training waits for the disk."""
    keep_last: Positive = 2
    """Newest checkpoints of this run that are kept; older ones are deleted once a newer one is complete,
    unless one of the next three settings keeps them."""
    keep_every_steps: Positive | None = None
    """Checkpoints whose step is a multiple of this are never deleted."""
    keep_every_epochs: Positive | None = None
    """The first checkpoint after every so many epochs is never deleted."""
    keep_best: Positive | None = None
    """So many checkpoints with the lowest evaluation loss are kept."""
    start_from: str | None = None
    """Initial weights: a Hugging Face folder, a checkpoint, or a run directory. Optimizer, step and data
    start from zero."""
