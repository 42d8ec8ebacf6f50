"""The kernels of a compiled graph: which operations are fused, in which order they run, what each allocates.

A model of inductor's scheduler. Operations over the same number of elements are fused when they read the same
buffer or one reads the other's output; an output that is read only inside its kernel is never written. The
order is the graph's, or greedily the one that frees most, whichever has the lower peak. A kernel writes its
output over an input that is not read afterwards (inductor's buffer reuse).
"""

import dataclasses
from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.fx import Node

from meshwright.ops.trees import tree_leaves
from meshwright.rehearse.allocation_log import rounded
from meshwright.rehearse.operations import Operation, Operations

# Inputs that the caller of a graph holds as well: they are neither freed nor overwritten.
_CALLER_INPUTS = ("primals_", "tangents_")


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Operations that are fused into one kernel, and what running it does to memory."""

    operations: tuple[Operation, ...]
    overwritten: tuple[Node, ...]
    """Inputs whose memory its outputs reuse."""
    written: tuple[Node, ...]
    """Outputs that are written to memory."""
    freed: tuple[Node, ...]
    """Values that are not read after it."""


def kernels_of(operations: Operations) -> list[Kernel]:
    """The kernels of a graph, in the order in which they run."""
    groups = _fused(operations.ordered)
    orders = (_in_order(groups), _least_first(groups, operations))
    return min((_scheduled(order, operations) for order in orders), key=peak_bytes)


def num_bytes(node: Node) -> int:
    """Bytes that CUDA's allocator hands out for the tensors of a node."""
    tensors = [one for one in tree_leaves(node.meta.get("val")) if isinstance(one, Tensor)]
    # The size of a random generator's state is symbolic; reading it would specialise the graph.
    fixed = [one for one in tensors if isinstance(one.numel(), int)]
    return sum(rounded(one.numel() * one.element_size()) for one in fixed)


def peak_bytes(kernels: Sequence[Kernel]) -> int:
    """The most bytes that a graph allocates at once, beyond those of its inputs."""
    held = highest = 0
    for kernel in kernels:
        held += sum(map(num_bytes, kernel.written)) - sum(map(num_bytes, kernel.overwritten))
        highest = max(highest, held)
        held -= sum(num_bytes(one) for one in kernel.freed if not one.name.startswith(_CALLER_INPUTS))
    return highest


class _Group:
    """Operations of one kernel while operations are being fused."""

    def __init__(self, operation: Operation) -> None:
        self.operations = [operation]
        self.needs: set[_Group] = set()
        self.readers: set[_Group] = set()

    @property
    def first(self) -> int:
        return min(one.number for one in self.operations)

    def merge(self, other: "_Group") -> None:
        """Take the other group's operations and edges over."""
        self.operations += other.operations
        for mine, theirs, back in (
            (self.needs, other.needs, "readers"),
            (self.readers, other.readers, "needs"),
        ):
            for neighbour in theirs:
                getattr(neighbour, back).discard(other)
                getattr(neighbour, back).add(self)
            mine |= theirs
            mine -= {self, other}

    def reaches(self, other: "_Group") -> bool:
        """Whether the other group depends on this one through a third one."""
        waiting, seen = [one for one in self.readers if one is not other], set[_Group]()
        while waiting:
            group = waiting.pop()
            if group is other:
                return True
            if group not in seen:
                seen.add(group)
                waiting += group.readers
        return False


def _fused(operations: Sequence[Operation]) -> list[_Group]:
    groups = {one: _Group(one) for one in operations}
    makers = {output: one for one in operations for output in one.outputs}
    for one in operations:
        for before in {*(makers[root] for root in one.reads if root in makers), *one.after} - {one}:
            groups[one].needs.add(groups[before])
            groups[before].readers.add(groups[one])
    for one, other in _candidates(operations):
        left, right = groups[one], groups[other]
        if left is not right and _may_fuse(left, right):
            left.merge(right)
            groups.update(dict.fromkeys(right.operations, left))
    return list(dict.fromkeys(groups.values()))


def _candidates(operations: Sequence[Operation]) -> list[tuple[Operation, Operation]]:
    """Pairs over the same number of elements with a buffer in common, those that share most bytes first."""
    fusible = [one for one in operations if one.kind != "extern" and one.outputs]
    pairs = []
    for index, other in enumerate(fusible):
        for one in fusible[:index]:
            shared = (one.reads & other.reads) | (other.reads & frozenset(one.outputs))
            if shared and one.num_elements == other.num_elements:
                pairs.append((-sum(map(num_bytes, shared)), other.number - one.number, one, other))
    return [(one, other) for _, _, one, other in sorted(pairs, key=lambda pair: pair[:2])]


def _may_fuse(left: _Group, right: _Group) -> bool:
    together = left.operations + right.operations
    read = frozenset[Node]().union(*(one.reads for one in together))
    for one in together:
        # A reduction over other dims than the last is complete only when the kernel has ended.
        if one.kind == "reduction" and not one.is_row_wise and not read.isdisjoint(one.outputs):
            return False
    return not (left.reaches(right) or right.reaches(left))


def _in_order(groups: Sequence[_Group]) -> list[_Group]:
    """The order of the graph, with what a kernel needs before it."""
    found: dict[_Group, None] = {}

    def place(group: _Group) -> None:
        if group not in found:
            for before in sorted(group.needs, key=lambda one: one.first):
                place(before)
            found[group] = None

    for group in sorted(groups, key=lambda one: one.first):
        place(group)
    return list(found)


def _least_first(groups: Sequence[_Group], operations: Operations) -> list[_Group]:
    """Greedily the kernel after which the fewest bytes are live, of those that can run next."""
    left = {group: len(group.needs) for group in groups}
    uses = _uses(groups)
    found: list[_Group] = []
    while left:
        ready = [group for group, count in left.items() if count == 0]
        chosen = min(ready, key=lambda group: (_growth(group, uses, operations), group.first))
        found.append(chosen)
        del left[chosen]
        for root in _reads(chosen):
            uses[root].discard(chosen)
        for reader in chosen.readers:
            left[reader] -= 1
    return found


def _growth(group: _Group, uses: dict[Node, set[_Group]], operations: Operations) -> int:
    written = sum(map(num_bytes, _written(group, uses, operations)))
    return written - sum(
        num_bytes(root)
        for root in _reads(group)
        if uses[root] == {group} and _is_freed_here(root, operations)
    )


def _uses(groups: Iterable[_Group]) -> dict[Node, set[_Group]]:
    """The groups that read each value."""
    uses: dict[Node, set[_Group]] = {}
    for group in groups:
        for root in _reads(group):
            uses.setdefault(root, set()).add(group)
    return uses


def _reads(group: _Group) -> frozenset[Node]:
    return frozenset[Node]().union(*(one.reads for one in group.operations))


def _is_freed_here(root: Node, operations: Operations) -> bool:
    """Whether a value is freed after its last read: neither the graph's output nor held by its caller."""
    return root not in operations.outputs and not root.name.startswith(_CALLER_INPUTS)


def _written(group: _Group, uses: dict[Node, set[_Group]], operations: Operations) -> list[Node]:
    """Outputs that are read outside of the kernel or returned; of extern kernels all."""
    return [
        output
        for one in group.operations
        for output in one.outputs
        if one.kind == "extern" or output in operations.outputs or uses.get(output, set()) - {group}
    ]


def _scheduled(order: Sequence[_Group], operations: Operations) -> list[Kernel]:
    uses = _uses(order)
    waiting = {root: {one for one in operations.ordered if root in one.reads} for root in uses}
    kernels = []
    for group in order:
        written = _written(group, uses, operations)
        over = [] if _is_extern(group) else _overwritten(group, written, waiting, operations)
        for root in _reads(group):
            waiting[root] -= set(group.operations)
        unwritten = {output for one in group.operations for output in one.outputs} - set(written)
        done = [root for root in (*_reads(group), *written) if not waiting.get(root)]
        kernels.append(
            Kernel(
                operations=tuple(sorted(group.operations, key=lambda one: one.number)),
                overwritten=tuple(over),
                written=tuple(written),
                freed=tuple(one for one in done if one not in {*over, *unwritten, *operations.outputs}),
            )
        )
    return kernels


def _is_extern(group: _Group) -> bool:
    return group.operations[0].kind == "extern"


def _overwritten(
    group: _Group, written: Sequence[Node], waiting: dict[Node, set[Operation]], operations: Operations
) -> list[Node]:
    """Inputs whose memory an output reuses: same dtype and size, and no read is left.

    A read by the same kernel counts as left, unless the output depends on it: then it comes first.
    """
    makers = {output: one for one in group.operations for output in one.outputs}
    taken: list[Node] = []
    for output in written:
        before = _ancestors(makers[output], makers)
        for root in makers[output].reads - set(taken):
            is_free = waiting[root] <= before and _is_freed_here(root, operations)
            if is_free and root not in makers and _same_size(root, output):
                taken.append(root)
                break
    return taken


def _ancestors(operation: Operation, makers: dict[Node, Operation]) -> set[Operation]:
    """The operation itself and those of its kernel that it depends on."""
    found: set[Operation] = set()
    waiting = [operation]
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting += [makers[root] for root in one.reads if root in makers]
    return found


def _same_size(one: Node, other: Node) -> bool:
    left, right = one.meta.get("val"), other.meta.get("val")
    if not isinstance(left, Tensor) or not isinstance(right, Tensor):
        return False
    return left.dtype == right.dtype and left.numel() == right.numel()
