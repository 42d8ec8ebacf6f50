"""Row counts of routed experts: as the router decided, or assumed even in a rehearsal."""

import pytest
import torch

from meshwright.ops.routed_rows import EvenRowCounts, RoutedRowCounts

SENT_RE = torch.tensor([[3, 1], [0, 2], [4, 0]])
RECEIVED_RE = torch.tensor([[1, 1], [5, 0], [2, 2]])


def test_routed_counts_are_sums_over_the_experts_of_a_rank() -> None:
    assert RoutedRowCounts().exchanged(SENT_RE, RECEIVED_RE, 10) == ([4, 2, 4], [2, 5, 4])
    assert RoutedRowCounts().within_capacity(torch.tensor([3, 0, 5]), 100, 1.25) == 8


@pytest.mark.parametrize(("imbalance", "each"), [(1.0, 2), (2.5, 4), (0.01, 1)])
def test_even_counts_send_every_row_and_receive_by_the_imbalance(imbalance: float, each: int) -> None:
    received_RE = RECEIVED_RE.clone()
    sent, received = EvenRowCounts(imbalance).exchanged(SENT_RE, received_RE, 10)
    assert sent == [4, 3, 3]
    assert received == [2 * each] * 3
    assert received_RE.tolist() == [[each, each]] * 3


@pytest.mark.parametrize(("factor", "rows"), [(0.5, 50), (1.25, 100)])
def test_even_experts_fill_up_to_their_capacity(factor: float, rows: int) -> None:
    assert EvenRowCounts().within_capacity(torch.tensor([100, 0]), 100, factor) == rows
