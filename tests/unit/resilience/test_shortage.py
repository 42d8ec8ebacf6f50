"""How ranks with cards get out of a step that one of them cannot finish; the card is an event here."""

import dataclasses
import threading
from unittest.mock import patch

import pytest
import torch
from tests.support.harness import this_world

from meshwright.errors import MeshwrightError, RunError
from meshwright.resilience import shortage as subject
from meshwright.resilience.shortage import GuardedProgram, Lookout, Shortage, shortage_behind

SHORT_RANK = 1


class _Program:
    """Rank 1 is out of memory. Rank 0's host waits in a collective; rank 2's has gone on to the agreement."""

    stages, owned = [], []

    def __init__(self, card: threading.Event, wait_seconds: float) -> None:
        self._card, self._wait_seconds = card, wait_seconds

    def accumulate(self, microbatches, *, scale=1.0):
        rank = this_world().rank
        if rank == SHORT_RANK:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        if rank == 0:
            was_ended = self._card.wait(self._wait_seconds)
            raise RuntimeError("the communicator was aborted" if was_ended else "nothing ended it")
        return torch.zeros(())


def _step(can_end: bool, wait_seconds: float, patience_seconds: float):
    world = dataclasses.replace(this_world(), device=torch.device("cuda"))
    card, order = threading.Event(), []

    def end(_world) -> bool:
        order.append(threading.current_thread().name)
        if can_end:
            card.set()
        return can_end

    with (
        patch.object(subject, "connect_device_groups", lambda _: None),
        patch.object(subject, "end_device_collectives", end),
        patch.object(subject, "PATIENCE_SECONDS", patience_seconds),
        patch.object(subject, "MEETING_SECONDS", 60.0 if can_end else 1.0),
    ):
        program = GuardedProgram(_Program(card, wait_seconds), Lookout(world, 0, goes_on=True))
        try:
            program.accumulate([])
        except (Shortage, RunError) as error:
            behind = shortage_behind(error, program, rank=world.rank)
            left = [thread.name for thread in threading.enumerate() if thread.name == "shortage"]
            return type(error), str(error), behind and behind.is_final, order, left
    return None


def test_all_hosts_come_out_of_the_step_wherever_they_are(ranks):
    found = ranks.run(_step, 3, True, 60.0, 60.0)
    assert [(kind, text) for kind, text, *_ in found] == [(Shortage, "rank 1: CUDA out of memory.")] * 3
    assert all(is_final is False for _, _, is_final, _, _ in found)
    assert all(len(order) == 1 for *_, order, _ in found), "collectives are ended once"
    assert found[0][3] == ["shortage"], "the host itself waits for its card"
    assert all(left == [] for *_, left in found)


def test_a_card_that_cannot_be_freed_ends_the_run(ranks):
    found = ranks.run(_step, 2, False, 4.0, 2.0)
    assert [kind for kind, *_ in found] == [RunError, RunError]
    assert all("not every rank came out of that step" in text for _, text, *_ in found)
    assert all(behind is None for _, _, behind, *_ in found)


@pytest.mark.parametrize(
    ("error", "is_shortage"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (Shortage(3, "CUDA out of memory.", is_final=True), True),
        (MeshwrightError("a fact"), False),
        (RuntimeError("something else"), False),
    ],
)
def test_what_struck_outside_of_forward_and_backward_is_final(error, is_shortage):
    found = shortage_behind(error, _Program(threading.Event(), 0.0), rank=0)
    assert (found is not None) == is_shortage
    assert found is None or found.is_final


def test_a_pipelines_wrapped_error_is_seen_through():
    wrapped = RuntimeError("stage 1 failed")
    wrapped.__cause__ = torch.OutOfMemoryError("CUDA out of memory.")
    found = shortage_behind(wrapped, _Program(threading.Event(), 0.0), rank=2)
    assert found is not None and found.rank == 2
