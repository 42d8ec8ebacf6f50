"""Gradients of parameters that are cut over ranks (DTensors), added up without holding Python's lock.

A DTensor's operators are run by torch with that lock held. The sum of a micro-batch's gradient with those
before it is one of them; on a card whose queue is full it waits, and no other thread of the process runs
while it does. So just before autograd would add a gradient, the parts that lie here are added as what they
are: plain tensors. The sums, and where they lie, are the same.
"""

import weakref
from collections.abc import Iterable, Sequence
from functools import partial

from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def add_plainly(stages: Iterable[nn.Module]) -> list[Node]:
    """From now on, for as long as what is returned is kept. FSDP adds up by itself, without autograd."""
    nodes: list[Node] = []
    for stage in stages:
        for parameter in () if isinstance(stage, FSDPModule) else stage.parameters():
            if isinstance(parameter, DTensor) and parameter.requires_grad:
                node = get_gradient_edge(parameter).node
                node.register_prehook(partial(_add, weakref.ref(parameter)))
                nodes.append(node)
    return nodes


def _add(owner: weakref.ref[nn.Parameter], gradients: Sequence[Tensor]) -> tuple[Tensor] | None:
    """Leaves autograd the whole sum as the first gradient of its kind, which it takes over as it is."""
    parameter, (new,) = owner(), gradients
    total = None if parameter is None else parameter.grad
    if parameter is None or not isinstance(total, DTensor) or not isinstance(new, DTensor):
        return None
    parameter.grad = None
    total.to_local().add_(new.to_local())
    return (total,)
