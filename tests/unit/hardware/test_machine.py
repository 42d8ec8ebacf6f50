"""This machine."""

import os

import pytest

from meshwright.hardware.machine import cores_of_quota, this_machine


def test_this_machine_is_plausible():
    machine = this_machine()
    assert 1 <= machine.cores <= (os.cpu_count() or 1)
    assert 2**26 < machine.free_memory_bytes < 2**50


@pytest.mark.parametrize(
    ("text", "cores"),
    [("200000 100000\n", 2), ("150000 100000", 1), ("400000 50000", 8)],
)
def test_a_quota_counts_whole_cores(text: str, cores: int):
    assert cores_of_quota(text) == cores


@pytest.mark.parametrize("text", ["max 100000", "", "nonsense"])
def test_no_quota_is_no_limit(text: str):
    assert cores_of_quota(text) > 10**5
