"""Shared fixtures."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings

from meshwright.rehearse.rank_pool import RankPool

# A slow machine is no failure.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def ranks():
    """The pool of gloo ranks: `ranks.run(function, world_size, *args)`."""
    pool = RankPool()
    yield pool
    pool.close()
