"""Rows sorted by expert and their sum: values, gradients, dropped choices, no atomics."""

import torch

from meshwright.ops.expert_rows import rows_by_expert, rows_of_tokens, rows_of_tokens_twice, sum_of_rows

EXPERTS_TC = torch.tensor([[2, 0], [0, 1], [2, 1], [0, 2]])


def test_rows_are_sorted_by_expert_and_keep_the_order_of_tokens() -> None:
    rows = rows_by_expert(EXPERTS_TC)
    assert rows.token_N.tolist() == [0, 1, 3, 1, 2, 0, 2, 3]
    assert rows.choices(EXPERTS_TC).tolist() == [0, 0, 0, 1, 1, 2, 2, 2]


def test_the_sum_of_a_gather_is_each_token_times_its_choices() -> None:
    x_TD = torch.randn(4, 3, dtype=torch.float64)
    rows = rows_by_expert(EXPERTS_TC)
    torch.testing.assert_close(sum_of_rows(rows_of_tokens(x_TD, rows), rows), 2 * x_TD)


def test_dropped_choices_count_as_zero() -> None:
    experts_TC = torch.where(EXPERTS_TC == 2, 3, EXPERTS_TC)  # every choice of expert 2 is dropped
    rows = rows_by_expert(experts_TC, num_kept=5)
    y_TD = sum_of_rows(rows_of_tokens(torch.ones(4, 1), rows), rows)
    assert y_TD.flatten().tolist() == [1.0, 2.0, 1.0, 1.0]


def test_no_choice_at_all_is_kept() -> None:
    rows = rows_by_expert(EXPERTS_TC, num_kept=0)
    x_TD = torch.ones(4, 3, requires_grad=True)
    y_TD = sum_of_rows(rows_of_tokens(x_TD, rows), rows)
    y_TD.sum().backward()
    assert not y_TD.any() and x_TD.grad is not None and not x_TD.grad.any()


def test_gradients() -> None:
    x_TD = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    for num_kept in (None, 5):
        rows = rows_by_expert(EXPERTS_TC, num_kept)
        for gather in (rows_of_tokens, rows_of_tokens_twice):
            assert torch.autograd.gradcheck(lambda x, gather=gather, rows=rows: gather(x, rows), (x_TD,))
        y_ND = torch.randn(len(rows.choice_N), 3, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(lambda y, rows=rows: sum_of_rows(y, rows), (y_ND,))


def test_sums_of_bf16_rows_are_in_fp32() -> None:
    y_ND = torch.tensor([[256.0], [1.0]], dtype=torch.bfloat16)
    y_TD = sum_of_rows(y_ND, rows_by_expert(torch.tensor([[0, 1]])))
    assert y_TD.dtype == torch.bfloat16 and y_TD.item() == torch.tensor(257.0).bfloat16().item()
    y_TD = sum_of_rows(
        torch.tensor([[256.0], [1.0], [1.0]]).bfloat16(), rows_by_expert(torch.tensor([[0, 1, 2]]))
    )
    assert y_TD.item() == 258.0  # in bf16, 256 + 1 is 256
