"""One matmul per group, empty groups included."""

import torch

from meshwright.ops.grouped_mm import count_groups, grouped_linear


def test_each_row_meets_the_weight_of_its_group() -> None:
    generator = torch.Generator().manual_seed(0)
    x_ND = torch.randn(6, 4, dtype=torch.float64, generator=generator)
    weight_EFD = torch.randn(3, 5, 4, dtype=torch.float64, generator=generator).requires_grad_()
    y_NF = grouped_linear(x_ND, weight_EFD, torch.tensor([2, 0, 4]))
    expected = torch.stack([x @ weight_EFD[e].t() for x, e in zip(x_ND, [0, 0, 2, 2, 2, 2], strict=True)])
    torch.testing.assert_close(y_NF, expected)
    y_NF.sum().backward()
    assert weight_EFD.grad is not None and not weight_EFD.grad[1].any() and weight_EFD.grad[2].any()


def test_compiled_code_has_one_graph_for_any_counts() -> None:
    """The compiler would split it at counts that it reads from a tensor, and at times fail on them."""
    generator = torch.Generator().manual_seed(0)
    x_ND = torch.randn(6, 4, dtype=torch.float64, generator=generator).requires_grad_()
    weight_EFD = torch.randn(3, 5, 4, dtype=torch.float64, generator=generator).requires_grad_()
    compiled = torch.compile(
        lambda x, w, counts: grouped_linear(x.sin(), w, counts), fullgraph=True, backend="aot_eager"
    )
    for counts in (torch.tensor([2, 0, 4]), torch.tensor([0, 5, 1])):
        found, expected = compiled(x_ND, weight_EFD, counts), grouped_linear(x_ND.sin(), weight_EFD, counts)
        torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)
        weights = torch.randn(6, 5, dtype=torch.float64, generator=generator)
        gradients = [torch.autograd.grad((y * weights).sum(), (x_ND, weight_EFD)) for y in (found, expected)]
        torch.testing.assert_close(*gradients, rtol=1e-14, atol=1e-15)


def test_autocast_applies() -> None:
    x_ND, weight_EFD = torch.randn(2, 4), torch.randn(1, 3, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert grouped_linear(x_ND, weight_EFD, torch.tensor([2])).dtype == torch.bfloat16


def test_counts_leave_out_what_is_no_group() -> None:
    assert count_groups(torch.tensor([[0, 2], [2, 3]]), 3).tolist() == [1, 0, 2]
