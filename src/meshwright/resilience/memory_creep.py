"""Host memory that grows from checkpoint to checkpoint: a leak that ends the run hours later."""

from collections import deque

import psutil

from meshwright.units import show_bytes

_NUM_SAMPLES = 8
_LEAST_BYTES = 2**29
_LEAST_SHARE = 0.1


class MemoryCreep:
    """Looks at the memory of this process now and then; warns once when it only ever grows."""

    def __init__(self) -> None:
        self._samples: deque[int] = deque(maxlen=_NUM_SAMPLES)
        self._has_warned = False

    def look(self, used_bytes: int | None = None) -> str | None:
        """Take a sample, by default the resident memory of this process; the warning where one is due.

        It is due when memory has grown at each of the last samples, by a tenth and by 512 MiB in all.
        """
        self._samples.append(psutil.Process().memory_info().rss if used_bytes is None else used_bytes)
        samples = list(self._samples)
        first, last = samples[0], samples[-1]
        is_growing = len(samples) == _NUM_SAMPLES and samples == sorted(set(samples))
        if self._has_warned or not is_growing or last - first < max(_LEAST_BYTES, _LEAST_SHARE * first):
            return None
        self._has_warned = True
        return (
            f"host memory of this rank grew at each of the last {_NUM_SAMPLES - 1} checkpoints, from "
            f"{show_bytes(first)} to {show_bytes(last)}; does the loader or a hook keep tensors?"
        )
