"""When state is saved, how much is kept, and what a run starts from."""

from meshwright.spec.base import Positive, Spec


class CheckpointSpec(Spec):
    """Nothing is saved on the way by default; the final state always is."""

    every_steps: Positive | None = None
    """Save this often; null saves at the end only."""
    keep_last: Positive = 2
    """Older checkpoints of this run are deleted once a newer one is complete."""
    start_from: str | None = None
    """Initial weights: a Hugging Face folder, a checkpoint, or a run directory; the rest starts anew."""
