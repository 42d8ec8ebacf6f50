"""A compiled graph as inductor lowers it: operations that write memory, and values that are inlined.

Matmuls, attention and everything else that inductor does not generate code for are extern kernels, which
write what they return. A pointwise operator is inlined into each operation that reads it, unless it must be
realized (written to memory): for an extern kernel, for the graph's caller, or because too much would be
computed several times. Reductions are always realized. Views allocate nothing.

The thresholds are inductor's own (`realize_*` of its config).
"""

import dataclasses
import operator
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.fx import Graph, Node

from meshwright.ops.trees import tree_leaves

_aten, _prims = torch.ops.aten, torch.ops.prims

# Buffers read by a pointwise value above which it is realized: with several readers, and in any case.
READS_IF_SHARED = 4
READS_AT_MOST = 8
OPERATORS_AT_MOST = 30

# Pointwise for inductor although torch does not tag them so: inlined where they are read.
_COMPUTED_WHERE_READ = {
    _prims.convert_element_type,
    _prims.iota,
    _aten._to_copy,
    _aten.arange,
    _aten.cat,
    _aten.clone,
    _aten.constant_pad_nd,
    _aten.copy,
    _aten.copy_,
    _aten.embedding,
    _aten.empty,
    _aten.flip,
    _aten.full,
    _aten.full_like,
    _aten.gather,
    _aten.index,
    _aten.index_select,
    _aten.repeat,
    _aten.scalar_tensor,
    _aten.select_scatter,
    _aten.slice_scatter,
    _aten.tril,
    _aten.triu,
}
_REDUCTIONS = {
    _aten.all,
    _aten.amax,
    _aten.amin,
    _aten.any,
    _aten.argmax,
    _aten.argmin,
    _aten.max,
    _aten.mean,
    _aten.min,
    _aten.prod,
    _aten.sum,
    _aten.var,
    _aten.var_mean,
}
# Waiting for a collective returns the collective's own output.
WAIT = torch.ops._c10d_functional.wait_tensor
_VIEWS = {_aten.reshape, _aten._unsafe_view, WAIT}


@dataclasses.dataclass(eq=False)
class Operation:
    """One write to memory: an extern operator, or a realized value of a fused kernel."""

    number: int
    node: Node
    kind: str
    """extern, pointwise or reduction."""
    reads: frozenset[Node]
    """The buffers that it reads: inputs of the graph and outputs of other operations."""
    outputs: tuple[Node, ...]
    """The buffers that it writes; several where an operator returns several tensors."""
    num_elements: int
    """Elements that it iterates over."""
    is_row_wise: bool = False
    """Whether it is a reduction over the last dims, so that a reader of its result can be fused with it."""
    after: tuple["Operation", ...] = ()
    """Operations that must run before it because one of the two overwrites what the other reads."""


@dataclasses.dataclass(frozen=True)
class _Value:
    """How a node is computed: the buffers it reads, each with the view it reads, and inlined operators."""

    reads: frozenset[tuple[Node, Node]]
    inlined: frozenset[Node] = frozenset()

    @property
    def roots(self) -> frozenset[Node]:
        return frozenset(root for root, _ in self.reads)


class Operations:
    """The operations of a graph, in its order."""

    def __init__(self, graph: Graph) -> None:
        self.ordered: list[Operation] = []
        self.constants: list[Node] = []
        self._values: dict[Node, _Value] = {}
        self._writers: dict[Node, Operation] = {}
        self._readers: dict[Node, list[Operation]] = {}
        for node in graph.nodes:
            self._visit(node)
        (self.returned,) = (node for node in graph.nodes if node.op == "output")
        self.outputs = frozenset(root for node in _inputs(self.returned) for root in self._values[node].roots)

    def _visit(self, node: Node) -> None:
        if node.op == "placeholder" or node.op == "get_attr":
            self._values[node] = _written(node)
            if node.op == "get_attr":
                self.constants.append(node)
        elif (
            node.op == "call_function" and node not in self._values
        ):  # an output of several is set by its operator
            self._call(node)

    def _call(self, node: Node) -> None:
        inputs = [self._values[one] for one in _inputs(node)]
        reads = frozenset[tuple[Node, Node]]().union(*(one.reads for one in inputs))
        if is_view(node):
            if len(reads) == 1 and not inputs[0].inlined:
                reads = frozenset((root, node) for root, _ in reads)
            self._values[node] = _Value(reads, inputs[0].inlined if inputs else frozenset())
            return
        inlined = frozenset([node]).union(*(one.inlined for one in inputs))
        value = _Value(reads, inlined)
        kind = _kind(node)
        if kind == "pointwise" and not _is_mutable(node) and not _must_be_written(node, value):
            self._values[node] = value
            return
        self._write(node, kind, value)

    def _write(self, node: Node, kind: str, value: _Value) -> None:
        mutated = _mutated(node)
        overwritten = frozenset[Node]().union(*(self._values[one].roots for one in mutated))
        outputs = () if mutated else _outputs(node)
        found = Operation(
            number=len(self.ordered),
            node=node,
            kind=kind,
            reads=value.roots,
            outputs=outputs,
            num_elements=_num_elements(node, kind),
            is_row_wise=kind == "reduction" and _is_row_wise(node),
            after=self._order(value.roots, overwritten),
        )
        self.ordered.append(found)
        for root in value.roots:
            self._readers.setdefault(root, []).append(found)
        for root in overwritten:
            self._writers[root] = found
        for output in outputs:
            self._values[output] = _written(output)
        if node not in self._values:
            self._values[node] = self._values[mutated[0]] if mutated else _Value(frozenset())

    def _order(self, read: frozenset[Node], overwritten: frozenset[Node]) -> tuple[Operation, ...]:
        """Operations that overwrote what is read, and operations that read what is overwritten."""
        writers = [self._writers[root] for root in read if root in self._writers]
        return (*writers, *(one for root in overwritten for one in self._readers.get(root, ())))


def is_operator(target: object) -> TypeGuard[torch._ops.OpOverload]:
    """Whether a node calls an operator of torch; its class is private, and used in this file only."""
    return isinstance(target, torch._ops.OpOverload)


def _written(node: Node) -> _Value:
    return _Value(frozenset([(node, node)]))


def _inputs(node: Node) -> list[Node]:
    """Nodes among the arguments."""
    return [one for one in node.all_input_nodes if one.op != "output"]


def is_view(node: Node) -> bool:
    """Whether a node is a view of a buffer, or of an inlined value."""
    if node.target is operator.getitem:
        return True
    target = node.target
    if not is_operator(target) or target._schema.is_mutable:
        return False
    return target._overloadpacket in _VIEWS or any(one.alias_info for one in target._schema.returns)


def _is_mutable(node: Node) -> bool:
    return bool(_mutated(node))


def _mutated(node: Node) -> list[Node]:
    """Arguments that an operator mutates."""
    target = node.target
    if not is_operator(target) or not target._schema.is_mutable:
        return []
    arguments = target._schema.arguments
    given = {**dict(zip((one.name for one in arguments), node.args, strict=False)), **node.kwargs}
    written = [given.get(one.name) for one in arguments if one.alias_info and one.alias_info.is_write]
    return [one for one in tree_leaves(written) if isinstance(one, Node)]


def _kind(node: Node) -> str:
    packet = getattr(node.target, "_overloadpacket", None)
    if packet in _REDUCTIONS:
        return "reduction"
    is_random = str(packet).startswith("prims.inductor_")  # inductor's own; they exist once it is loaded
    if packet in _COMPUTED_WHERE_READ or is_random or torch.Tag.pointwise in getattr(node.target, "tags", ()):
        return "pointwise"
    return "extern"


def _must_be_written(node: Node, value: _Value) -> bool:
    size = len(value.inlined) + len(value.reads)
    if len(value.reads) > READS_AT_MOST or size > OPERATORS_AT_MOST:
        return True
    if len(node.users) > 1 and len(value.reads) > READS_IF_SHARED:
        return True
    return any(user.op == "output" or _runs_by_itself(user) for user in _readers_through_views(node))


def _runs_by_itself(node: Node) -> bool:
    return _kind(node) == "extern" or _is_mutable(node)


def _readers_through_views(node: Node) -> set[Node]:
    found: set[Node] = set()
    for user in node.users:
        found |= _readers_through_views(user) if user.op == "call_function" and is_view(user) else {user}
    return found


def _outputs(node: Node) -> tuple[Node, ...]:
    if isinstance(node.meta.get("val"), Tensor):
        return (node,)
    return tuple(user for user in node.users if user.target is operator.getitem)


def _num_elements(node: Node, kind: str) -> int:
    if kind == "reduction":
        return max(_tensor(one).numel() for one in _inputs(node))
    return sum(one.numel() for one in tree_leaves(node.meta.get("val")) if isinstance(one, Tensor))


def _is_row_wise(node: Node) -> bool:
    """Whether a reduction is over the last dims and leaves at least one."""
    source = _tensor(_inputs(node)[0])
    dims: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    dims = [dims] if isinstance(dims, int) else dims
    if not dims:
        return False
    over = sorted(dim % source.ndim for dim in dims)
    return over == list(range(source.ndim - len(over), source.ndim)) and len(over) < source.ndim


def _tensor(node: Node) -> Tensor:
    return next(one for one in tree_leaves(node.meta["val"]) if isinstance(one, Tensor))
