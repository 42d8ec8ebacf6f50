"""What is held while something runs, by item, and the fullest moment of it: for many layouts at once.

A tape is written by hand after the program: `hold` where an operator makes a tensor, `free` where the last
one lets go of it. Sizes are arrays over layouts, so that one tape serves all of them; what a layout does not
have is of size 0.
"""

import numpy as np

from meshwright.plan.workload.layouts import Floats

Items = dict[str, Floats]


class Tape:
    """Held bytes by name; every array has shape (M,)."""

    def __init__(self, num_rows: int) -> None:
        self._zero = np.zeros(num_rows)
        self._held: dict[str, tuple[str, Floats]] = {}
        self._now: Items = {}
        self._total = self._zero
        self._is_rising = False
        self.peak_bytes = self._zero
        self.peak: Items = {}

    def hold(self, item: str, **sizes: Floats | float) -> None:
        """These tensors are made; a name holds one tensor at a time."""
        for name, size in sizes.items():
            assert name not in self._held, f"{name} is held already"
            array = self._zero + size
            self._held[name] = (item, array)
            self._now[item] = self._now.get(item, self._zero) + array
            self._total = self._total + array
        self._is_rising = True

    def free(self, *names: str) -> None:
        """These tensors are let go of; names that are not held are passed over."""
        self.look()
        for name in names:
            if name in self._held:
                item, array = self._held.pop(name)
                self._now[item] = self._now[item] - array
                self._total = self._total - array

    def rename(self, **names: str) -> None:
        """The tensors are known by other names from now on: new=old."""
        for new, old in names.items():
            self._held[new] = self._held.pop(old)

    @property
    def held_bytes(self) -> Floats:
        """Everything that is held now."""
        return self._total

    def held_of(self, item: str) -> Floats:
        """Of this item."""
        return self._now.get(item, self._zero)

    def size(self, name: str) -> Floats:
        """Bytes of one tensor; 0 when it is not held."""
        return self._held[name][1] if name in self._held else self._zero

    def look(self) -> None:
        """Compare the present moment with the fullest so far."""
        if not self._is_rising:
            return
        self._is_rising = False
        better = self._total > self.peak_bytes
        self.peak_bytes = np.where(better, self._total, self.peak_bytes)
        self.peak = {
            item: np.where(better, now, self.peak.get(item, self._zero)) for item, now in self._now.items()
        }
