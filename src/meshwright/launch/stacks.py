"""The stacks of a local rank's threads, written when the process that watches it asks. Imports no torch."""

import faulthandler
import os
from pathlib import Path

from meshwright.launch.launched import RANK_FOLDER, is_supervised, launched_rank
from meshwright.launch.watch import STACK_SIGNAL, stack_path


def write_stacks_on_signal() -> None:
    """From now on STACK_SIGNAL writes the stacks of all threads to a file of the supervisor, if there is one.

    The handler is written in C: it answers also when Python code waits in a collective.
    """
    launched = launched_rank()
    if launched is None or not is_supervised():
        return
    folder = Path(os.environ[RANK_FOLDER])
    # The file stays open for the life of the process: the handler has only its descriptor.
    file = os.open(stack_path(folder, launched.rank), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    faulthandler.register(STACK_SIGNAL, file=file, all_threads=True)
