"""Hashes of a rank's own gradients, from before the reduction: after it a wrong gradient is on every rank."""

from collections.abc import Sequence

from torch import Tensor

from meshwright.ops.bit_hash import combined, sum_of_bits
from meshwright.parallel.gradient_bucket import local_gradient
from meshwright.parallel.shards import ParameterShard


class GradientHashes:
    """Hashes of gradients by parameter, recorded between `start` and `stop` (`resilience.replay`)."""

    def __init__(self) -> None:
        self._found: dict[str, Tensor] | None = None

    def start(self) -> None:
        """Record the gradients that are reduced from now on."""
        self._found = {}

    def stop(self) -> dict[str, Tensor]:
        """Record no longer; returns the hashes since `start`, by parameter."""
        found, self._found = self._found or {}, None
        return found

    def add(self, shards: Sequence[ParameterShard]) -> None:
        """Record the gradients of these parameters, which are about to be reduced. No host sync."""
        if self._found is None:
            return
        for one in shards:
            bits = sum_of_bits(local_gradient(one))
            before = self._found.get(one.name)
            self._found[one.name] = bits if before is None else combined(before, bits)
