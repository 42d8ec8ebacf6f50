"""A run that cannot fit into the memory of this machine is refused before it is built."""

import errno
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.support.runs import tiny_run

from meshwright.errors import PlanError
from meshwright.hardware.machine import this_machine
from meshwright.train import capacity

CPU = torch.device("cpu")


def _with_free(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(
        capacity, "this_machine", lambda: replace(this_machine(), free_memory_bytes=num_bytes)
    )


def test_state_that_does_not_fit_is_refused(monkeypatch):
    run = tiny_run()
    _with_free(monkeypatch, 1 << 62)
    capacity.require_capacity(run, CPU)
    _with_free(monkeypatch, 1000)
    with pytest.raises(
        PlanError, match=r"the run needs .* KiB for weights, gradients and optimizer"
    ) as caught:
        capacity.require_capacity(run, CPU)
    assert caught.value.where == "device=cpu" and caught.value.hint
    capacity.require_capacity(run, torch.device("cuda"))


def test_a_full_disk_is_a_failed_run():
    error = capacity.capacity_error(OSError(errno.ENOSPC, "No space left on device"), Path("runs/x"), rank=0)
    assert error is not None and error.exit_code == 4 and error.where == "runs/x"
    assert "No space left on device" in error.fact and "resumes from the newest checkpoint" in error.hint
    assert capacity.capacity_error(FileNotFoundError(errno.ENOENT, "gone"), Path("runs/x"), rank=0) is None


def test_an_oom_of_the_host_is_recognised_by_its_text():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert capacity.out_of_memory_in(caught.value) is caught.value
    assert capacity.out_of_memory_in(RuntimeError("something else")) is None


def test_an_oom_inside_another_error_is_found():
    """torch's pipeline raises errors of its own for what a stage raises."""
    oom = torch.OutOfMemoryError("CUDA out of memory.")
    with pytest.raises(RuntimeError) as caught:
        raise RuntimeError("stage 1 failed") from oom
    assert capacity.out_of_memory_in(caught.value) is oom
    error = capacity.capacity_error(caught.value, Path("runs/x"), rank=2)
    assert (
        error is not None and error.fact == "rank 2 ran out of memory outside of a step: CUDA out of memory."
    )
