"""Triton's interpreter, which runs kernels on a CPU.

It is chosen when a kernel is defined, so it has a process of its own: a test module that runs itself as a
program and prints a word for everything that it has compared.
"""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed here")


def words_of(module: str) -> list[str]:
    """What this module prints as a program inside the interpreter; a failure there fails the test."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-m", module], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()
