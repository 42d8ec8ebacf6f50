"""What trades seconds for bytes."""

from typing import Literal

from meshwright.spec.base import Positive, Spec


class MemorySpec(Spec):
    """Nothing is traded by default."""

    recompute: Literal["none", "selective", "full"] = "none"
    """selective keeps matmul and attention outputs and recomputes the cheap rest."""
    recompute_every: Positive = 1
    """Recompute every k-th layer (1: all of them)."""
    on_oom: Literal["stop", "halve_microbatch"] = "stop"
    """When a rank runs out of memory: stop, or take the same batch again in smaller micro-batches."""
