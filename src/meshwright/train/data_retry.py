"""A batch that a rank cannot read is read again inside the process, while the other ranks wait.

All ranks agree on it after a step, in the exchange that asks for stop signals, when no rank has entered a
collective of the next step. Weights, process groups and compiled code stay as they are, and the position in
the data does not move: no sample is left out or used twice.
"""

import itertools
import time

import torch
import torch.distributed as dist

from meshwright.errors import LostRank
from meshwright.resilience.interrupt import Interrupt
from meshwright.train.job import Job
from meshwright.train.record import Recorder
from meshwright.train.state import TrainState

_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 1.0, 30.0


def is_stop_agreed(job: Job, recorder: Recorder, interrupt: Interrupt, state: TrainState) -> bool:
    """Whether any rank was asked to stop; all ranks call it after a step that is not the last. Communicates
    between hosts: no device is waited for.

    Returns when every rank has its next batch. After `resilience.data_retries` the rank that cannot read
    raises its error, and the others LostRank.
    """
    for attempt in itertools.count(1):
        error = job.batches.read_ahead()
        stops, has_failed = _anywhere(interrupt.is_requested, error is not None)
        if stops or not has_failed:
            return stops
        text = f"the batch after step {state.step} cannot be read: {_by_rank(error)}"
        retries = job.run.resilience.data_retries
        if attempt > retries:
            raise error or LostRank(text, where="data", hint="see the error of that rank")
        wait = min(_LONGEST_WAIT_SECONDS, _FIRST_WAIT_SECONDS * 2.0 ** (attempt - 1))
        recorder.record_data_retry(f"{text}; it is read again in {wait:g} s ({attempt} of {retries})")
        time.sleep(wait)
        job.batches.wait_seconds += wait
        if error is not None:
            job.batches.read_again()
    raise AssertionError("unreachable")


def _anywhere(*flags: bool) -> list[bool]:
    """Whether each flag is set on any rank."""
    found = torch.tensor([int(flag) for flag in flags])
    if dist.get_world_size() > 1:
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return [bool(one) for one in found.tolist()]


def _by_rank(error: Exception | None) -> str:
    """The errors of the ranks that have one; all ranks call it."""
    own = " ".join(str(error).split()) if error is not None else ""
    texts = [own] * dist.get_world_size()
    if len(texts) > 1:
        dist.all_gather_object(texts, own)
    return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text)
