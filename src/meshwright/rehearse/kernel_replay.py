"""Runs the kernels of a compiled graph on fake tensors: memory is allocated and freed as on the device."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from meshwright.ops.trees import tree_map_only
from meshwright.rehearse.fusion import Kernel, kernels_of
from meshwright.rehearse.operations import WAIT, Operation, Operations, is_operator, is_view

_CASTS = (torch.ops.prims.convert_element_type, torch.ops.aten._to_copy)
Boxed = Callable[[list[Any]], Sequence[Any]]


def replay_graph(module: GraphModule, watch: Callable[[Kernel], None] | None = None) -> Boxed:
    """The graph as a boxed function: it empties the list of inputs it gets, so that they can be freed.

    `watch` gets each kernel before it runs.
    """
    operations = Operations(module.graph)
    kernels = kernels_of(operations)
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    unread = [node for node in inputs if not any(node in one.reads for one in operations.ordered)]

    def run(given: list[Any]) -> Sequence[Any]:
        values = dict(zip(inputs, given, strict=True))
        given.clear()
        for node in unread:
            if node not in operations.outputs:
                del values[node]
        return _Run(values, operations, kernels, watch).result()

    run._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess] - how torch knows that it empties the list
    return run


class _Run:
    """One call of a graph: the tensors that are live, by the node that wrote them."""

    def __init__(
        self,
        values: dict[Node, Any],
        operations: Operations,
        kernels: list[Kernel],
        watch: Callable[[Kernel], None] | None,
    ) -> None:
        self._values, self._operations, self._kernels = values, operations, kernels
        self._watch = watch

    def result(self) -> Sequence[Any]:
        """Run all kernels and return the graph's outputs."""
        for node in self._operations.constants:
            self._values[node] = _empty(node.meta["val"])
        for kernel in self._kernels:
            if self._watch is not None:
                self._watch(kernel)
            self._launch(kernel)
        returned: Any = self._operations.returned.args[0]
        return map_arg(returned, self._value)

    def _launch(self, kernel: Kernel) -> None:
        casts = {one.node: self._cast(one) for one in kernel.operations if one.kind == "pointwise"}
        for node in kernel.overwritten:
            self._values.pop(node, None)
        for one in kernel.operations:
            if one.kind == "extern":
                self._call(one)
        for node in kernel.written:
            if node not in self._values:
                self._values[node] = (
                    casts.get(node) if casts.get(node) is not None else _empty(node.meta["val"])
                )
        for node in kernel.freed:
            self._values.pop(node, None)

    def _cast(self, one: Operation) -> Tensor | None:
        """The result of a dtype cast of a live tensor, by its own operator, so that the log can label it."""
        source = one.node.args[0] if one.node.args else None
        if getattr(one.node.target, "_overloadpacket", None) not in _CASTS or not isinstance(source, Node):
            return None
        return one.node.target(*map_arg(one.node.args, self._value)) if source in self._values else None  # pyright: ignore

    def _call(self, one: Operation) -> None:
        target: Any = one.node.target
        args, kwargs = map_arg(one.node.args, self._value), map_arg(one.node.kwargs, self._value)
        found = _run(target, args, kwargs, one.node)
        if one.outputs == (one.node,):
            self._values[one.node] = found
            return
        for output in one.outputs:
            self._values[output] = found[output.args[1]]

    def _value(self, node: Node) -> Any:
        """The tensor of a node; a view is made of the tensor that it views."""
        if node in self._values:
            return self._values[node]
        target: Any = node.target
        is_other = is_view(node) and getattr(target, "_overloadpacket", None) is not WAIT
        if is_other:
            return target(*map_arg(node.args, self._value), **map_arg(node.kwargs, self._value))
        return self._value(node.all_input_nodes[0])  # the tensor that was waited for, or mutated


def _run(target: Any, args: Any, kwargs: Any, node: Node) -> Any:
    """Call an extern operator; of a higher-order one only its outputs are allocated."""
    if is_operator(target):
        return target(*args, **kwargs)
    name = getattr(target, "__name__", "")
    if name == "run_and_save_rng_state":
        return torch.empty(0), args[0](*args[1:], **kwargs)  # CUDA's generator state is on the host
    if name == "run_with_rng_state":
        return args[1](*args[2:], **kwargs)
    return tree_map_only(Tensor, _empty, node.meta.get("val"))


def _empty(like: Tensor) -> Tensor:
    """A new tensor of the same shape, strides and dtype."""
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="cpu")
