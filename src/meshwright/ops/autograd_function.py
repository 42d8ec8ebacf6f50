"""Calls of a `torch.autograd.Function` that also compile where nothing needs a gradient.

There torch's compiler traces `forward` itself, and leaves out its context when the arguments are as many as
its parameters. A `forward` that ends in `*weights` has as many with two of them, such as gate and up: the
compiler (torch 2.11 to 2.13) then takes the input for the context, and gives up or raises.
"""

from typing import Any

import torch
from torch import Tensor


class _NoBackward:
    """The context of a `forward` whose backward never runs."""

    def save_for_backward(self, *_: Tensor | None) -> None:
        """Save nothing."""


def applied(function: type[torch.autograd.Function], *inputs: Any) -> Any:
    """`function.apply(*inputs)`; `forward` alone where no input needs a gradient."""
    needs_gradient = any(isinstance(one, Tensor) and one.requires_grad for one in inputs)
    if needs_gradient and torch.is_grad_enabled():
        return function.apply(*inputs)
    return function.forward(_NoBackward(), *inputs)
