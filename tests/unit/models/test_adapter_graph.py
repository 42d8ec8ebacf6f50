"""Where parameters of an adapter enter the path from input to output: at the same nodes, or at others.

Pipeline schedules that split backward (torch's `get_param_groups`) rely on it. Where two parameters share
only some of the nodes, whether a backward runs twice depends on the order of a set.
"""

from collections import defaultdict
from itertools import combinations, product

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from meshwright.models.layers.adapter import Adapter, AdapterDropout, ExpertAdapter

SETTINGS = list(product((False, True), (None, 0.3)))


def entries(y: Tensor, x: Tensor, parameters: list[nn.Parameter]) -> list[set[Node]]:
    """The nodes at which each parameter enters the path from x to y."""
    consumers: dict[Node, set[Node]] = defaultdict(set)
    assert y.grad_fn is not None
    waiting, seen = [y.grad_fn], {y.grad_fn}
    while waiting:
        node = waiting.pop()
        for below, _ in node.next_functions:
            if below is None:
                continue
            consumers[below].add(node)
            if below not in seen:
                seen.add(below)
                waiting.append(below)
    leaves = {node.variable.data_ptr(): node for node in seen if hasattr(node, "variable")}
    path = reached(leaves[x.data_ptr()], consumers, set())[0]
    return [reached(leaves[one.data_ptr()], consumers, path)[1] for one in parameters]


def reached(start: Node, consumers: dict[Node, set[Node]], stop: set[Node]) -> tuple[set[Node], set[Node]]:
    """The nodes that follow from a leaf, and those of `stop` at which they end."""
    waiting, found, ends = [start], {start}, set[Node]()
    while waiting:
        for above in consumers[waiting.pop()]:
            if above in stop:
                ends.add(above)
            elif above not in found:
                found.add(above)
                waiting.append(above)
    return found, ends


def assert_grouped(found: list[set[Node]]) -> None:
    assert all(found)
    assert all(one == other or not one & other for one, other in combinations(found, 2))


@pytest.mark.parametrize(("has_magnitude", "probability"), SETTINGS)
def test_a_linear(has_magnitude: bool, probability: float | None) -> None:
    dropout = None if probability is None else AdapterDropout(probability, "up.weight")
    adapter = Adapter(6, 5, rank=2, scale=2.0, dropout=dropout, has_magnitude=has_magnitude)
    x, weight = torch.randn(2, 3, 6, requires_grad=True), torch.randn(5, 6)
    randomise(adapter)
    keys = torch.arange(6).view(2, 3)
    y = adapter(x, x @ weight.T, dropout_keys=keys, weight=weight, frozen=lambda one: one @ weight.T)
    assert_grouped(entries(y, x, list(adapter.parameters())))


@pytest.mark.parametrize(("has_magnitude", "probability"), SETTINGS)
def test_routed_experts(has_magnitude: bool, probability: float | None) -> None:
    dropout = None if probability is None else AdapterDropout(probability, "experts.up")
    adapter = ExpertAdapter(2, 6, 5, rank=2, scale=2.0, dropout=dropout, has_magnitude=has_magnitude)
    x, weight = torch.randn(4, 6, requires_grad=True), torch.randn(2, 5, 6)
    randomise(adapter)
    counts = torch.tensor([4, 0])
    options = {"dropout_keys_N": torch.arange(4), "weight_EFD": weight}
    y = adapter(x, x @ weight[0].T, counts, frozen=lambda one: one @ weight[0].T, **options)
    assert_grouped(entries(y, x, list(adapter.parameters())))


def randomise(module: nn.Module) -> None:
    with torch.no_grad():
        for one in module.parameters():
            one.copy_(torch.rand_like(one) + 0.5)
