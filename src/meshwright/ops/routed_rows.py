"""How many rows go to and come from the experts of other ranks: counted, or assumed in a rehearsal.

A rehearsal has no other ranks, so what they send is nobody's to know: even, or uneven by a factor.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

# Of the process, not of the thread: CUDA's backward, which may compute a forward again, has its own threads.
_assumed: list[float] = []


@contextmanager
def routed_evenly(imbalance: float = 1.0) -> Iterator[None]:
    """Inside, rows go evenly to all experts; this rank receives `imbalance` times as many."""
    _assumed.append(imbalance)
    try:
        yield
    finally:
        _assumed.pop()


def exchanged_rows(sent_RE: Tensor, received_RE: Tensor, num_rows: int) -> tuple[list[int], list[int]]:
    """Rows that go to and come from each rank, by the counts per rank and expert. Host sync.

    In a rehearsal they are assumed, and `received_RE` is made to say the same.
    """
    if not _assumed:
        return sent_RE.sum(1).tolist(), received_RE.sum(1).tolist()
    num_ranks, num_experts = sent_RE.shape
    share, rest = divmod(num_rows, num_ranks)
    each = max(1, round(_assumed[-1] * num_rows / (num_ranks * num_experts)))
    received_RE.fill_(each)
    return [share + (rank < rest) for rank in range(num_ranks)], [each * num_experts] * num_ranks


def kept_rows(counts_E: Tensor, num_rows: int, capacity_factor: float) -> int:
    """Rows that experts of a limited capacity take. Host sync; in a rehearsal all are filled evenly."""
    if not _assumed:
        return int(counts_E.sum())
    return int(num_rows * min(1.0, capacity_factor))
