"""Processes whose wall clock jumps, by a shim before the C library (clock_shim.c).

Setting the real clock would disturb everything else on the machine, and time namespaces have no wall clock of
their own.
"""

import os
import shutil
import struct
import subprocess
from pathlib import Path

_SOURCE = Path(__file__).with_name("clock_shim.c")


class ShiftedClock:
    """The wall clock of the processes that were started with `environment`."""

    def __init__(self, folder: Path) -> None:
        self._file, self._library = folder / "clock_offset", folder / "clock_shim.so"
        self.set(0)
        compiler = shutil.which("cc") or "cc"
        command = [compiler, "-shared", "-fPIC", "-O1", "-o", self._library, _SOURCE, "-ldl"]
        subprocess.run(command, check=True, capture_output=True)

    def set(self, seconds: int) -> None:
        """Let the clock be ahead of the real one by this, at once and for all of its processes."""
        with open(self._file, "r+b" if self._file.exists() else "wb") as file:
            file.write(struct.pack("l", seconds))

    def environment(self) -> dict[str, str]:
        """The variables of a process with this clock."""
        return {"LD_PRELOAD": str(self._library), "CLOCK_OFFSET_FILE": str(self._file)}


def lacking_clock() -> str:
    """Why there can be no shifted clock here; empty where there can."""
    is_glibc = os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in os.confstr_names else None
    if not is_glibc:
        return "needs the GNU C library"
    return "" if shutil.which("cc") else "needs a C compiler"
