"""What the observer records of autograd's own gradient sums, which torch makes in place on a device."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from meshwright.rehearse.allocation_log import AllocationLog
from meshwright.rehearse.dispatch import Observer

NUM_BYTES = 4 * 1024


class _Free(torch.autograd.Function):
    """A gradient that only the engine refers to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return x.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return torch.ones(ctx.shape)


class _Held(torch.autograd.Function):
    """A gradient that the function keeps a reference to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.kept = torch.ones_like(x)
        return x.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.kept


def bytes_of_sums(*functions: Any) -> int:
    """Bytes that the gradient sums of one tensor allocate, for a sum of these functions of it."""
    allocations = AllocationLog()
    with FakeTensorMode(), Observer(allocations, Mock()):
        leaf = torch.ones(NUM_BYTES // 4, requires_grad=True)
        middle = leaf * 1.0
        first, second = (function.apply(middle) for function in functions)
        torch.autograd.backward(first + second)
        made = [held for held in allocations.records if held.operator == "aten.add"]
    # The sum of the two losses is an addition too, of one number.
    return sum(
        event.num_bytes
        for event in allocations.events
        if event.num_bytes == NUM_BYTES and _is_of(event, made)
    )


def _is_of(event: Any, records: list[Any]) -> bool:
    return any(event.number == record.number for record in records)


@pytest.mark.parametrize("functions", [(_Free, _Free), (_Free, _Held), (_Held, _Free)])
def test_a_gradient_is_added_to_one_without_other_references(functions: Any) -> None:
    assert bytes_of_sums(*functions) == 0


def test_a_sum_of_two_held_gradients_is_new() -> None:
    assert bytes_of_sums(_Held, _Held) == NUM_BYTES
