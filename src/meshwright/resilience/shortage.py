"""When a rank runs out of memory, all ranks learn of it and take the same decision.

The rank that runs out says so in the store, which needs no partner. The others find it there: in the
agreement after a step's gradients, or when a collective fails because that rank has left it.

On a card a collective does not fail: it waits, and soon the host waits for the card. So every rank has a
second thread during a step that looks into the store. When it finds a shortage, these threads meet in the
store and end all collectives at the same time; then every host comes to the agreement by itself.
"""

import datetime
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.errors import MeshwrightError, RunError
from meshwright.mesh import World, connect_device_groups, end_device_collectives
from meshwright.parallel.program import Program
from meshwright.resilience.plain_sums import add_plainly

_POLL_SECONDS = 1.0
_MEETING_POLL_SECONDS = 0.1
# All ranks look within _POLL_SECONDS; one that is not in a step at the moment is not waited for.
MEETING_SECONDS = 5.0
# After its collectives have ended a host has nothing left to wait for.
PATIENCE_SECONDS = 120.0
_LONGEST_TEXT = 300
# Torch watches NCCL too. A partner's collectives that end look to it like a failure, for which it would end
# the process a minute later; with this it only ends the collectives, and at once. It would also write down
# where each was called, for which it needs Python's lock.
_NCCL_SETTINGS = {
    "TORCH_FR_BUFFER_SIZE": "0",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250",
}


class Shortage(Exception):
    """A rank could not get the memory that a step needs; raised on every rank."""

    def __init__(self, rank: int, text: str, *, is_final: bool = False) -> None:
        super().__init__(f"rank {rank}: {text}")
        self.rank, self.text = rank, text
        self.is_final = is_final
        """Whether weights may have moved already, so that there is nothing to go on from."""


def prepare_device_groups() -> None:
    """Called before process groups are made, where training may go on; what the user has set counts."""
    for name, value in _NCCL_SETTINGS.items():
        os.environ.setdefault(name, value)


class Lookout:
    """One rank's view of who ran out of memory, for one attempt at training. All ranks build it."""

    def __init__(self, world: World, attempt: int, *, goes_on: bool) -> None:
        self._world, self._key = world, f"shortage-{attempt}"
        # A group of its own: in any other a partner may wait for the step's own data.
        self._group = dist.new_group(backend="gloo") if goes_on else None
        if goes_on:
            connect_device_groups(world)
        self.goes_on = goes_on
        """Whether training goes on after a shortage: only then do ranks agree after every step."""
        self._has_cards = goes_on and world.device.type == "cuda" and world.num_ranks > 1
        self._ending, self._has_ended = threading.Lock(), False

    def announce(self, error: torch.OutOfMemoryError, *, is_final: bool = False) -> Shortage:
        """Tell the others; where several ranks run out at once, the first one is told."""
        mine = Shortage(self._world.rank, first_words(error), is_final=is_final)
        if self._world.store is None:
            return mine
        return _parsed(
            self._world.store.compare_set(self._key, "", _written(mine)).decode() or _written(mine)
        )

    def announced(self) -> Shortage | None:
        """What another rank told; None also where the store is gone with the rank that held it."""
        store = self._world.store
        try:
            if store is None or not store.check([self._key]):
                return None
            return _parsed(store.get(self._key).decode())
        except RuntimeError:
            return None

    def agree(self, own: Shortage | None) -> None:
        """All ranks call it between gradients and update: if one is short, it is raised on all.

        Where training would end anyway nothing is exchanged. Else it waits for the host of every rank, not
        for devices: memory is asked for by the host.
        """
        if not self.goes_on:
            if own is not None:
                raise own
            return
        if own is not None:
            self._end_collectives(own)
        if own is None or not own.is_final:  # else that rank is gone
            own = self._exchange(own)
        if own is not None:
            # This rank's host may be past collectives that its card still waits in, and with it all that
            # the card is given from now on.
            self._end_collectives(own)
            raise own

    def _exchange(self, own: Shortage | None) -> Shortage | None:
        """Wait for all ranks; what any of them is short of."""
        is_short = torch.tensor([int(own is not None)])
        # gloo's own timeout is that of the slowest step; a rank that knows waits for nothing slow.
        patience = datetime.timedelta(seconds=PATIENCE_SECONDS if own and self._has_cards else 0)
        try:
            work = dist.all_reduce(is_short, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
            assert work is not None
            work.wait(patience) if patience else work.wait()
        except RuntimeError:
            if own is not None and self._has_cards:
                raise _cannot_go_on(own) from None
            own = own or self.announced()
            if own is None:
                raise
        return self.announced() if own is None and bool(is_short) else own

    @contextmanager
    def watching(self) -> Iterator[None]:
        """On a card: ends collectives that wait for a rank which is out of memory."""
        if not self._has_cards:
            yield
            return
        is_over = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(is_over,), name="shortage", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            is_over.set()
            watcher.join()

    def _watch(self, is_over: threading.Event) -> None:
        while not is_over.wait(_POLL_SECONDS):
            if self.announced() is not None:
                self._end_at_once()
                return

    def _end_collectives(self, own: Shortage) -> None:
        if self._has_cards and not self._end_at_once():
            raise _cannot_go_on(own)

    def _end_at_once(self) -> bool:
        """All ranks at the same time: what ends on one rank breaks for its partners."""
        with self._ending:
            if not self._has_ended:
                self._meet()
                self._has_ended = end_device_collectives(self._world)
            return self._has_ended

    def _meet(self) -> None:
        """Wait a moment for all ranks, whatever their hosts are doing."""
        store, place = self._world.store, f"{self._key}-met"
        assert store is not None
        latest = time.monotonic() + MEETING_SECONDS
        num_here = store.add(place, 1)
        while num_here < self._world.num_ranks and time.monotonic() < latest:
            time.sleep(_MEETING_POLL_SECONDS)
            num_here = store.add(place, 0)


def _cannot_go_on(own: Shortage) -> RunError:
    return RunError(
        f"rank {own.rank} ran out of memory ({own.text}), and not every rank came out of that step",
        where="memory.on_oom",
        hint="start again with a smaller data.microbatch_sequences: the run goes on from its last checkpoint",
    )


def memory_error(error: BaseException | None) -> torch.OutOfMemoryError | None:
    """The shortage behind an error; torch's pipeline wraps what a stage raises in an error of its own."""
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__cause__
    return error


def first_words(error: torch.OutOfMemoryError) -> str:
    """What torch says, in one line of bearable length."""
    return " ".join(str(error).split())[:_LONGEST_TEXT]


def _written(shortage: Shortage) -> str:
    return f"{shortage.rank} {int(shortage.is_final)} {shortage.text}"


def _parsed(text: str) -> Shortage:
    rank, is_final, fact = text.split(" ", 2)
    return Shortage(int(rank), fact, is_final=is_final == "1")


class GuardedProgram:
    """A program whose gradients are there on all ranks, or a Shortage is raised on all."""

    def __init__(self, program: Program, lookout: Lookout) -> None:
        self.stages, self.owned = program.stages, program.owned
        self._program, self.lookout = program, lookout
        # What looks out is a thread; it must run while this one waits for a card.
        self._sums = add_plainly(program.stages) if lookout.goes_on else []

    def accumulate(self, microbatches: Sequence[Any], *, scale: float = 1.0) -> Tensor:
        """See Program."""
        own, loss = None, torch.zeros(())
        with self.lookout.watching():
            try:
                loss = self._program.accumulate(microbatches, scale=scale)
            except Exception as error:  # numbers from a collective that was ended may break anything
                short = memory_error(error)
                own = self.lookout.announce(short) if short else self.lookout.announced()
                if own is None:
                    raise
            self.lookout.agree(own)
        return loss

    def evaluate(self, microbatches: Sequence[Any]) -> Tensor:
        """See Program."""
        return self._program.evaluate(microbatches)

    def gather_parameters(self) -> None:
        """See Program."""
        self._program.gather_parameters()


def shortage_behind(error: Exception, program: Program, *, rank: int) -> Shortage | None:
    """The shortage that ended a step, this rank's or another's; None for any other error.

    One that comes to light only here struck outside of forward and backward: in the update, perhaps.
    """
    if isinstance(error, Shortage):
        return error
    if isinstance(error, MeshwrightError):
        return None
    short = memory_error(error)
    if isinstance(program, GuardedProgram):
        found = program.lookout.announce(short, is_final=True) if short else program.lookout.announced()
    else:
        found = Shortage(rank, first_words(short)) if short else None
    if found is not None:
        found.is_final = True
    return found
