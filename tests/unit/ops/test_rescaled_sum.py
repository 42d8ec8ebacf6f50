"""The sum of DoRA under dropout: its value, its gradients, and its place in the autograd graph."""

import torch
from torch import Tensor

from meshwright.ops.rescaled_sum import rescaled_sum

F64 = torch.float64


def inputs(*, is_stacked: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    y, frozen, added = (torch.randn(2, 3, 5, generator=generator, dtype=F64) for _ in range(3))
    ratio = 1 + 0.1 * torch.randn((2, 3, 5) if is_stacked else (5,), generator=generator, dtype=F64)
    return y.requires_grad_(), frozen.requires_grad_(), added.requires_grad_(), ratio.requires_grad_()


def test_gradients_are_those_of_the_formula() -> None:
    for is_stacked in (False, True):  # one ratio per output, and one per row of a routed expert
        given = inputs(is_stacked=is_stacked)
        y, frozen, added, ratio = given
        torch.testing.assert_close(rescaled_sum(*given), y + (ratio - 1) * frozen + ratio * added)
        assert torch.autograd.gradcheck(rescaled_sum, given)


def test_its_node_is_one_that_python_can_keep() -> None:
    """torch 2.11 frees the node of a Function between the two parts of a split backward."""
    node = rescaled_sum(*inputs(is_stacked=False)).grad_fn
    assert node is not None and not isinstance(node, torch.autograd.function.BackwardCFunction)


def test_a_small_change_of_a_large_output_is_kept_in_bf16() -> None:
    """(r - 1) f is computed before it is rounded beside y: r f - f would be lost in the rounding of r f."""
    frozen = torch.full((4,), 1000.0, dtype=torch.bfloat16)
    change = rescaled_sum(torch.zeros_like(frozen), frozen, torch.zeros_like(frozen), torch.full((4,), 1.001))
    torch.testing.assert_close(change, torch.full_like(frozen, 1.0))
