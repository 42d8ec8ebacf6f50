"""When a rank runs out of memory, all ranks learn of it and take the same decision.

The rank that runs out says so in the store, which needs no partner. The others find it there: in the
agreement after a step's gradients, or when a collective fails because that rank has left it.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.mesh import World, connect_device_groups, end_device_collectives
from meshwright.parallel.program import Program

_POLL_SECONDS = 1.0
_LONGEST_TEXT = 300


class Shortage(Exception):
    """A rank could not get the memory that a step needs; raised on every rank."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(f"rank {rank}: {text}")
        self.rank, self.text = rank, text


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

    def announce(self, error: torch.OutOfMemoryError) -> Shortage:
        """Tell the others; where several ranks run out at once, the first one is told."""
        text = first_words(error)
        mine = f"{self._world.rank} {text}"
        if self._world.store is None:
            return Shortage(self._world.rank, text)
        return _parsed(self._world.store.compare_set(self._key, "", mine).decode() or mine)

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
        is_short = torch.tensor([int(own is not None)])
        try:
            dist.all_reduce(is_short, op=dist.ReduceOp.MAX, group=self._group)
        except RuntimeError:
            own = own or self.announced()
            if own is None:
                raise
        if own is None and bool(is_short):
            own = self.announced()
        if own is not None:
            # This rank's host may be past collectives that its card still waits in, and with it all that
            # the card is given from now on.
            end_device_collectives(self._world)
            raise own

    @contextmanager
    def watching(self) -> Iterator[None]:
        """On a card: ends collectives that wait for a rank which is out of memory."""
        if self._world.device.type != "cuda" or not self.goes_on or self._world.num_ranks == 1:
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
                end_device_collectives(self._world)
                return


def memory_error(error: BaseException | None) -> torch.OutOfMemoryError | None:
    """The shortage behind an error; torch's pipeline wraps what a stage raises in an error of its own."""
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__cause__
    return error


def first_words(error: torch.OutOfMemoryError) -> str:
    """What torch says, in one line of bearable length."""
    return " ".join(str(error).split())[:_LONGEST_TEXT]


def _parsed(text: str) -> Shortage:
    rank, _, fact = text.partition(" ")
    return Shortage(int(rank), fact)


class GuardedProgram:
    """A program whose gradients are there on all ranks, or a Shortage is raised on all."""

    def __init__(self, program: Program, lookout: Lookout) -> None:
        self.stages, self.owned = program.stages, program.owned
        self._program, self._lookout = program, lookout

    def accumulate(self, microbatches: Sequence[Any], *, scale: float = 1.0) -> Tensor:
        """See Program."""
        own, loss = None, torch.zeros(())
        try:
            with self._lookout.watching():
                loss = self._program.accumulate(microbatches, scale=scale)
        except RuntimeError as error:
            short = memory_error(error)
            # Else a collective has lost its partner: was that one short of memory?
            own = self._lookout.announce(short) if short else self._lookout.announced()
            if own is None:
                raise
        self._lookout.agree(own)
        return loss

    def evaluate(self, microbatches: Sequence[Any]) -> Tensor:
        """See Program."""
        return self._program.evaluate(microbatches)

    def gather_parameters(self) -> None:
        """See Program."""
        self._program.gather_parameters()
