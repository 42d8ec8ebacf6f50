"""Number of token rows that go to routed experts and come from other ranks: read on the host, or assumed.

A rehearsal has no other ranks, so nothing can tell what they send. It gives MoE layers `EvenRowCounts`.
"""

from typing import Protocol

from torch import Tensor


class RowCounts(Protocol):
    """Row counts that an MoE layer needs on the host, where sizes of tensors are decided."""

    def exchanged(self, sent_RE: Tensor, received_RE: Tensor, num_rows: int) -> tuple[list[int], list[int]]:
        """Rows sent to and received from each of R ranks, from counts per rank and local expert."""
        ...

    def within_capacity(self, counts_E: Tensor, num_rows: int, capacity_factor: float) -> int:
        """Rows that experts of a limited capacity accept, of `num_rows` routed ones."""
        ...


class RoutedRowCounts:
    """Row counts as the router decided them. Both methods are host syncs."""

    def exchanged(self, sent_RE: Tensor, received_RE: Tensor, num_rows: int) -> tuple[list[int], list[int]]:
        """Sums of the counts over the experts of each rank."""
        del num_rows
        return sent_RE.sum(1).tolist(), received_RE.sum(1).tolist()

    def within_capacity(self, counts_E: Tensor, num_rows: int, capacity_factor: float) -> int:
        """Sum of the counts; rows over the capacity are not counted."""
        del num_rows, capacity_factor
        return int(counts_E.sum())


class EvenRowCounts:
    """Assumed row counts: even over all experts, except that this rank receives `imbalance` times as many."""

    def __init__(self, imbalance: float = 1.0) -> None:
        self.imbalance = imbalance

    def exchanged(self, sent_RE: Tensor, received_RE: Tensor, num_rows: int) -> tuple[list[int], list[int]]:
        """Even counts; `received_RE` is overwritten with them."""
        num_ranks, num_experts = sent_RE.shape
        share, rest = divmod(num_rows, num_ranks)
        each = max(1, round(self.imbalance * num_rows / (num_ranks * num_experts)))
        received_RE.fill_(each)
        return [share + (rank < rest) for rank in range(num_ranks)], [each * num_experts] * num_ranks

    def within_capacity(self, counts_E: Tensor, num_rows: int, capacity_factor: float) -> int:
        """All experts are filled evenly."""
        del counts_E
        return int(num_rows * min(1.0, capacity_factor))
