"""Stop signals: the first one asks the loop to save and end, a later one ends at once."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from meshwright.launch.local import STOP_SIGNALS

# A scheduler, a terminal and `timeout` may each send the same signal, to the group and to the launcher, which
# passes it on: what arrives within this time is one request.
REPEAT_SECONDS = 5.0


class Interrupt:
    """Whether a signal asked this process to stop."""

    def __init__(self) -> None:
        self._requested_at: float | None = None

    def request(self, signal_number: int, frame: FrameType | None) -> None:
        """Handle a stop signal: ask for a stop, or end at once when asked again some seconds later."""
        now = time.monotonic()
        if self._requested_at is None:
            self._requested_at = now
        elif now - self._requested_at > REPEAT_SECONDS:
            raise KeyboardInterrupt

    @property
    def is_requested(self) -> bool:
        """Whether this process was asked to stop."""
        return self._requested_at is not None


@contextmanager
def stop_signals() -> Iterator[Interrupt]:
    """While inside, SIGINT, SIGTERM, SIGHUP and SIGUSR1 (a scheduler's early warning) ask for a stop."""
    interrupt = Interrupt()
    before = {number: signal.signal(number, interrupt.request) for number in STOP_SIGNALS}
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
