"""Figures on rows that took no part in the choice: memory of other frameworks with their source left out."""

import numpy as np
from bench.accuracy import load, memory_rows
from bench.left_out import memory_left_out


def test_memory_with_the_source_left_out() -> None:
    found = memory_left_out(memory_rows(load()[0]))
    assert len(found) >= 26
    assert np.median([abs(one.reserved_ratio - 1.0) for one in found]) <= 0.10
    assert np.median([abs(one.allocated_ratio - 1.0) for one in found]) <= 0.10
