"""The two ends of the pipe between the driver of `bench/step.py` and a contender: lines of JSON each way."""

import json
import os
import sys
from typing import IO, Any


class Channel:
    """Lines out, lines in."""

    def __init__(self, reads: IO[str], writes: IO[str]) -> None:
        self._reads, self._writes = reads, writes

    def send(self, **message: Any) -> None:
        """One message, at once."""
        self._writes.write(json.dumps(message) + "\n")
        self._writes.flush()

    def receive(self) -> dict[str, Any]:
        """The next message; EOFError when the other end is gone."""
        line = self._reads.readline()
        if not line:
            raise EOFError("the other end of the pipe is gone")
        return json.loads(line)


def channel_of_child() -> Channel:
    """Over standard input and output; what anyone prints from now on goes to standard error instead."""
    writes = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return Channel(sys.stdin, writes)
