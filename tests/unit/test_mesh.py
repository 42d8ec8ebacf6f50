"""The device of a process, and the error when there are too few."""

import sys

import pytest
import torch

from meshwright.errors import LaunchError, MeshError
from meshwright.mesh import choose_device, join_world, leave_world


@pytest.fixture
def one_device(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NCCL_HOSTID"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_the_only_visible_device_is_number_0_for_every_rank(one_device):
    assert choose_device("auto", 3) == torch.device("cuda", 0)


def test_more_ranks_than_devices_are_refused(one_device):
    for name, value in {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}.items():
        one_device.setenv(name, value)
    with pytest.raises(
        MeshError, match="8 ranks were started here, and CUDA devices that torch sees: 1"
    ) as caught:
        choose_device("auto", 0)
    assert caught.value.where == "parallel" and "device=cpu" in caught.value.hint
    assert choose_device("cpu", 0) == torch.device("cpu")
    one_device.setenv("NCCL_HOSTID", "host0")  # ranks that say they are hosts may share a card
    assert choose_device("cuda", 5) == torch.device("cuda", 0)


def test_a_variable_that_is_not_a_number_is_refused(one_device):
    for name, value in {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "two"}.items():
        one_device.setenv(name, value)
    with pytest.raises(LaunchError, match="LOCAL_WORLD_SIZE='two'"):
        choose_device("cuda", 0)


def test_a_world_of_one_leaves_tracebacks_as_they_are(monkeypatch: pytest.MonkeyPatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    hook = sys.excepthook
    join_world("cpu")
    leave_world()
    assert sys.excepthook is hook
