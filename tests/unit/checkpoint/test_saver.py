"""Saves in the background: what is written, who waits for whom, and what a failure does."""

import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from meshwright.checkpoint import save, saver, snapshot
from meshwright.checkpoint.load import complete_checkpoints, load_tensors
from meshwright.checkpoint.saver import Saver
from meshwright.spec import CheckpointSpec

EVERY = CheckpointSpec(every_steps=1, keep_last=10)
CPU = torch.device("cpu")


def new_saver(root: Path, spec: CheckpointSpec = EVERY) -> Saver:
    return Saver(root, spec, CPU, timeout_seconds=60.0)


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((3, 5), value), "b": torch.tensor(value), "c": torch.full((4,), value).bool()}


def saved(folder: Path) -> float:
    found = {"a": torch.zeros(3, 5), "b": torch.tensor(0.0)}
    load_tensors(folder, found)
    assert bool((found["a"] == found["b"]).all())
    return float(found["b"])


@contextmanager
def disk(before_write: Callable[[], None]) -> Any:
    """Call something before each shard file is written."""
    write = save.write_shard_file

    def watched(path: Path, content: Any) -> Any:
        before_write()
        return write(path, content)

    with patch.object(save, "write_shard_file", watched):
        yield


def _changed_while_written(root: Path) -> tuple[list[int], float, bool, float]:
    may_write, one = threading.Event(), new_saver(root)
    values = tensors(1.0)
    facts = {"list": [1]}
    with disk(lambda: may_write.wait(30) and None):
        assert one.start(1, values, facts) == []
        was_idle = one.poll() != []
        values["a"].fill_(7.0)  # the next step
        facts["list"].append(2)
        may_write.set()
        outcomes = one.wait()
    one.close()
    outcome = outcomes[0]
    assert outcome.folder is not None and outcome.error is None and outcome.is_background
    return [one.step for one in outcomes], saved(outcome.folder), was_idle, outcome.stall_seconds


@pytest.mark.parametrize("num_ranks", (1, 2))
def test_what_is_saved_is_the_state_of_the_call(ranks, tmp_path, num_ranks):
    for steps, value, was_idle, stall_seconds in ranks.run(_changed_while_written, num_ranks, tmp_path):
        assert (steps, value, was_idle) == ([1], 1.0, False)
        assert stall_seconds < 25


def _saved_twice(root: Path) -> tuple[list[int], float, list[str]]:
    one = new_saver(root)
    with disk(lambda: time.sleep(0.3)):
        one.start(1, tensors(1.0), {})
        ended = one.start(2, tensors(2.0), {})
        last = one.wait()[0]
    one.close()
    return (
        [outcome.step for outcome in ended],
        last.waited_seconds,
        [p.name for p in complete_checkpoints(root)],
    )


def test_the_next_save_waits_for_the_one_before(ranks, tmp_path):
    """There is one copy in memory, never two."""
    for steps, waited_seconds, names in ranks.run(_saved_twice, 2, tmp_path):
        assert steps == [1] and waited_seconds > 0.2
        assert names == ["step-00000001", "step-00000002"]


def _buffers_of_two_saves(root: Path) -> list[int]:
    one, addresses = new_saver(root), []
    for step in (1, 2):
        one.start(step, tensors(step), {})
        one.wait()
        assert one._snapshot._buffer is not None
        addresses.append(one._snapshot._buffer.data_ptr())
    one.close()
    return addresses


def test_host_memory_is_reused(ranks, tmp_path):
    first, second = ranks.run(_buffers_of_two_saves, 1, tmp_path)[0]
    assert first == second


def _failing(root: Path) -> dict[str, Any]:
    """The disk of the last rank is full once; the save is tried again when its pause is over."""
    one, is_full = new_saver(root, EVERY.with_(every_steps=100)), [True]

    def full() -> None:
        if is_full[0] and dist.get_rank() == dist.get_world_size() - 1:
            raise OSError(28, "No space left on device")

    with disk(full), patch.object(saver, "_FIRST_PAUSE_SECONDS", 0.2):
        one.start(100, tensors(1.0), {})
        failed = one.wait()[0]
        due = [one.is_due(101)]
        while not one.is_due(101):
            one.poll()
            time.sleep(0.02)
        is_full[0] = False
        one.start(101, tensors(2.0), {})
        retried = one.wait()[0]
    due += [one.is_due(102), one.is_due(200)]
    one.close()
    return {
        "error": failed.error and failed.error.fact,
        "due": due,
        "saved": retried.folder and saved(retried.folder),
        "step": one.saved_step,
    }


@pytest.mark.parametrize("num_ranks", (1, 2))
def test_a_failed_save_is_tried_again(ranks, tmp_path, num_ranks):
    error = f"rank {num_ranks - 1}: OSError: No space left on device"
    for found in ranks.run(_failing, num_ranks, tmp_path):
        assert found == {"error": error, "due": [False, False, True], "saved": 2.0, "step": 101}
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000101"]


def _without_room(root: Path) -> list[tuple[int, bool]]:
    one = new_saver(root)
    is_last = dist.get_rank() == dist.get_world_size() - 1
    with patch.object(snapshot, "host_share", lambda: 10 if is_last else 10**9):
        outcomes = one.start(1, tensors(1.0), {})
    one.close()
    return [(outcome.step, outcome.is_background) for outcome in outcomes]


def test_without_room_in_host_memory_training_waits_on_all_ranks(ranks, tmp_path):
    assert ranks.run(_without_room, 2, tmp_path) == [[(1, False)]] * 2
    assert saved(tmp_path / "step-00000001") == 1.0


def _synchronous(root: Path) -> list[tuple[int, bool]]:
    one = new_saver(root, EVERY.with_(asynchronous=False))
    outcomes = one.start(1, tensors(1.0), {})
    one.close()
    return [(outcome.step, outcome.is_background) for outcome in outcomes]


def test_synchronous_saves(ranks, tmp_path):
    assert ranks.run(_synchronous, 1, tmp_path) == [[(1, False)]]


def test_the_bytes_of_a_copy_are_known():
    assert snapshot.snapshot_bytes({"a": torch.zeros(16)}) == 64
    assert snapshot.snapshot_bytes({"a": torch.zeros(17), "b": torch.zeros(1)}) == 192
