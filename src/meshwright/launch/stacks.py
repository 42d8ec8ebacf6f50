"""The stacks of a local rank's threads, written when the process that watches it asks. Imports no torch."""

import faulthandler
import os
from pathlib import Path

from meshwright.launch.launched import is_local_rank, launched_rank
from meshwright.launch.meeting import STORE_FILE
from meshwright.launch.watch import STACK_SIGNAL, stack_path


def write_stacks_on_signal() -> None:
    """From now on STACK_SIGNAL writes the stacks of all threads to a file of the launcher; local ranks only.

    The handler is written in C: it answers also when Python code waits in a collective.
    """
    launched = launched_rank()
    if launched is None or not is_local_rank() or STORE_FILE not in os.environ:
        return
    folder = Path(os.environ[STORE_FILE]).parent
    # The file stays open for the life of the process: the handler has only its descriptor.
    file = os.open(stack_path(folder, launched.rank), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    faulthandler.register(STACK_SIGNAL, file=file, all_threads=True)
