"""Runs Triton kernels on a CPU, in Triton's interpreter.

TRITON_INTERPRET is read when a kernel is defined, so the interpreter needs a process of its own: the test
module runs itself as a program and prints the name of each comparison that it has made.
"""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed here")


def printed_in_interpreter(module: str) -> list[str]:
    """The names that this module prints when it runs as a program in the interpreter; it must not fail."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-m", module], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()
