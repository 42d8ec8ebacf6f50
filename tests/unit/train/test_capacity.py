"""A run that cannot fit into the memory of this machine is refused before it is built."""

import errno
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.support.runs import tiny_run

from meshwright.errors import PlanError
from meshwright.hardware.machine import this_machine
from meshwright.train import capacity as room

CPU = torch.device("cpu")


def _with_free(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(room, "this_machine", lambda: replace(this_machine(), free_memory_bytes=num_bytes))


def test_state_that_does_not_fit_is_told(monkeypatch):
    run = tiny_run()
    _with_free(monkeypatch, 1 << 62)
    room.require_capacity(run, CPU)
    _with_free(monkeypatch, 1000)
    with pytest.raises(
        PlanError, match=r"the run needs .* KiB for weights, gradients and optimizer"
    ) as caught:
        room.require_capacity(run, CPU)
    assert caught.value.where == "device=cpu" and caught.value.hint
    room.require_capacity(run, torch.device("cuda"))


def test_a_full_disk_is_a_failed_run():
    told = room.capacity_error(OSError(errno.ENOSPC, "No space left on device"), Path("runs/x"), rank=0)
    assert told is not None and told.exit_code == 4 and told.where == "runs/x"
    assert "No space left on device" in told.fact and "goes on from the last checkpoint" in told.hint
    assert room.capacity_error(FileNotFoundError(errno.ENOENT, "gone"), Path("runs/x"), rank=0) is None


def test_the_host_s_lack_of_memory_is_known_by_its_words():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert room.is_out_of_memory(caught.value)
    assert not room.is_out_of_memory(RuntimeError("something else"))
