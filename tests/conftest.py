"""Shared fixtures."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from tests.ranks import RankPool


@pytest.fixture(scope="session")
def ranks():
    """The pool of gloo ranks: `ranks.run(function, world_size, *args)`."""
    pool = RankPool()
    yield pool
    pool.close()
