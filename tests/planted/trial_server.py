"""Runs tests against a planted source, each trial in a fork of a process that has torch imported already.

Importing torch takes longer than most trials, once in pytest and once more in the server that ranks are
forked from. This program imports it once, and never meshwright, which each fork imports from its own
source. It reads one request per line and answers each with one line, both JSON.
"""

import gc
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import traceback
from multiprocessing import forkserver
from pathlib import Path

import hypothesis  # noqa: F401  (imported for the forks, like numpy, pydantic and torch)
import numpy as np  # noqa: F401
import pydantic  # noqa: F401
import pytest
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor

ROOT = Path(__file__).parents[2]
# Trials share a folder of temporary files: pytest itself may leave an iterator over it unclosed.
OPTIONS = ["-q", "-rA", "--tb=line", "--show-capture=no"]
OPTIONS += ["-p", "no:cacheprovider", "-p", "no:unraisableexception"]


class TrialServer:
    """The program as a subprocess, with a method to ask it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.planted.trial_server"],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, source: Path, arguments: list[str]) -> str:
        """What pytest prints with these arguments when meshwright is imported from `source`."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(
            json.dumps({"source": str(source), "arguments": arguments}), file=self._process.stdin, flush=True
        )
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """End the program."""
        self._process.communicate()


def serve() -> None:
    """Answer requests until the input ends."""
    torch.set_num_threads(1)
    gc.freeze()  # forks do not walk what is imported here
    for line in sys.stdin:
        with tempfile.TemporaryFile("w+") as output:
            _fork_trial(json.loads(line), output.fileno())
            output.seek(0)
            print(json.dumps(output.read()), flush=True)


def _fork_trial(request: dict, output: int) -> None:
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        _run_trial(Path(request["source"]), request["arguments"])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _run_trial(source: Path, arguments: list[str]) -> None:
    assert "meshwright" not in sys.modules
    sys.path.insert(0, str(source))
    sys.dont_write_bytecode = True
    # For programs that a test starts; and pytest loads no plugins, whose asserts it would rewrite each time.
    os.environ.update(PYTHONPATH=str(source), PYTHONDONTWRITEBYTECODE="1", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    # Ranks are forks of this process instead of a server's, which would import torch again.
    context = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda method=None: context
    forkserver.ensure_running = lambda: None
    pytest.main([*OPTIONS, *arguments])


if __name__ == "__main__":
    serve()
