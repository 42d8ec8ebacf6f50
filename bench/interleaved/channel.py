"""The pipe between the driver of `bench.step` and a contender's process: one JSON message per line."""

import json
import os
import sys
from typing import IO, Any


class Channel:
    """One end of the pipe."""

    def __init__(self, reads: IO[str], writes: IO[str]) -> None:
        self._reads, self._writes = reads, writes

    def send(self, **message: Any) -> None:
        """Send one message and flush."""
        self._writes.write(json.dumps(message) + "\n")
        self._writes.flush()

    def receive(self) -> dict[str, Any]:
        """The next message; EOFError when the other process has ended."""
        line = self._reads.readline()
        if not line:
            raise EOFError("the process at the other end of the pipe has ended")
        return json.loads(line)


def worker_channel() -> Channel:
    """The worker's end, on stdin and stdout; whatever is printed from now on goes to stderr."""
    writes = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return Channel(sys.stdin, writes)
