"""A file of JSON lines, one for a step, that a run appends to."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Self

from meshwright.observe.metrics import truncate_after


class StepLines:
    """Appends lines to a file; those after the restored step are removed first. Use as a context."""

    def __init__(self, path: Path, *, restored_step: int) -> None:
        self._path = path
        self._file = self._opened(restored_step)

    def _opened(self, step: int) -> BinaryIO:
        truncate_after(self._path, step)
        return self._path.open("ab", buffering=0)

    def rewind(self, step: int) -> None:
        """Remove the lines after `step`."""
        self._file.close()
        self._file = self._opened(step)

    def append(self, row: Mapping[str, Any]) -> None:
        """Append one line; not-a-number and infinity are refused, which JSON does not have."""
        self._file.write((json.dumps(row, allow_nan=False) + "\n").encode())

    def close(self) -> None:
        """Close the file; one without a line is removed."""
        self._file.close()
        if self._path.exists() and not os.path.getsize(self._path):
            self._path.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
