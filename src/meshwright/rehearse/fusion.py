"""The kernels of a compiled graph: which operations share one, in which order they run, what each holds.

A model of what torch's compiler does with the operations of a graph. Written values over the same elements
that read the same bytes, or one the other, share a kernel; one that is read nowhere else is never written.
The order is the graph's, or the one that always takes what frees most, whichever needs fewer bytes. A
kernel writes over an input that nobody reads after it.
"""

import dataclasses
from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from meshwright.rehearse.ledger import rounded
from meshwright.rehearse.operations import Operation, Operations

# The caller of a graph holds these inputs itself: nothing is written over them.
_HELD_OUTSIDE = ("primals_", "tangents_")


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Operations that run together."""

    operations: tuple[Operation, ...]
    overwritten: tuple[Node, ...]
    """Values whose bytes its outputs take."""
    written: tuple[Node, ...]
    """Outputs that get bytes."""
    forgotten: tuple[Node, ...]
    """Values that nobody reads after it."""


def kernels_of(operations: Operations) -> list[Kernel]:
    """The kernels of a graph, in the order they run."""
    groups = _fused(operations.found)
    orders = (_in_order(groups), _least_first(groups, operations))
    return min((_scheduled(order, operations) for order in orders), key=peak_bytes)


def num_bytes(node: Node) -> int:
    """What CUDA's allocator gives for the tensors of a node."""
    tensors = [one for one in tree_leaves(node.meta.get("val")) if isinstance(one, Tensor)]
    # The state of a generator has no fixed size; asking for it would bind the graph to one.
    fixed = [one for one in tensors if isinstance(one.numel(), int)]
    return sum(rounded(one.numel() * one.element_size()) for one in fixed)


def peak_bytes(kernels: Sequence[Kernel]) -> int:
    """The most that values of the graph hold at once, beyond what they held when it began."""
    held = highest = 0
    for kernel in kernels:
        held += sum(map(num_bytes, kernel.written)) - sum(map(num_bytes, kernel.overwritten))
        highest = max(highest, held)
        held -= sum(num_bytes(one) for one in kernel.forgotten if not one.name.startswith(_HELD_OUTSIDE))
    return highest


class _Group:
    """Operations of one kernel, while it grows."""

    def __init__(self, operation: Operation) -> None:
        self.operations = [operation]
        self.needs: set[_Group] = set()
        self.readers: set[_Group] = set()

    @property
    def first(self) -> int:
        return min(one.number for one in self.operations)

    def take(self, other: "_Group") -> None:
        """Become one."""
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

    def reaches(self, other: "_Group", *, apart_from: "_Group") -> bool:
        """Whether something after this one, other than `apart_from` directly, comes before the other."""
        waiting, seen = [one for one in self.readers if one is not apart_from], set[_Group]()
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
        if left is not right and _may_join(left, right):
            left.take(right)
            groups.update(dict.fromkeys(right.operations, left))
    return list(dict.fromkeys(groups.values()))


def _candidates(operations: Sequence[Operation]) -> list[tuple[Operation, Operation]]:
    """Pairs over the same elements that share bytes, those that share most first."""
    fusible = [one for one in operations if one.kind != "extern" and one.outputs]
    pairs = []
    for index, other in enumerate(fusible):
        for one in fusible[:index]:
            shared = (one.reads & other.reads) | (other.reads & frozenset(one.outputs))
            if shared and one.num_elements == other.num_elements:
                pairs.append((-sum(map(num_bytes, shared)), other.number - one.number, one, other))
    return [(one, other) for _, _, one, other in sorted(pairs, key=lambda pair: pair[:2])]


def _may_join(left: _Group, right: _Group) -> bool:
    together = left.operations + right.operations
    read = frozenset[Node]().union(*(one.reads for one in together))
    for one in together:
        # The sum of a column or of everything is known only when the whole kernel has run.
        if one.kind == "reduction" and not one.is_row_wise and not read.isdisjoint(one.outputs):
            return False
    return not (left.reaches(right, apart_from=right) or right.reaches(left, apart_from=left))


def _in_order(groups: Sequence[_Group]) -> list[_Group]:
    """As the graph has them; what a kernel needs comes before it."""
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
    """Of those that could run next always the one after which least is held."""
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
        num_bytes(root) for root in _reads(group) if uses[root] == {group} and _is_ours(root, operations)
    )


def _uses(groups: Iterable[_Group]) -> dict[Node, set[_Group]]:
    """Groups that read each value."""
    uses: dict[Node, set[_Group]] = {}
    for group in groups:
        for root in _reads(group):
            uses.setdefault(root, set()).add(group)
    return uses


def _reads(group: _Group) -> frozenset[Node]:
    return frozenset[Node]().union(*(one.reads for one in group.operations))


def _is_ours(root: Node, operations: Operations) -> bool:
    """Whether a value's bytes are let go when the graph needs them no more."""
    return root not in operations.kept and not root.name.startswith(_HELD_OUTSIDE)


def _written(group: _Group, uses: dict[Node, set[_Group]], operations: Operations) -> list[Node]:
    """Outputs that are read outside of the kernel, by the caller too; those of extern ones all."""
    return [
        output
        for one in group.operations
        for output in one.outputs
        if one.kind == "extern" or output in operations.kept or uses.get(output, set()) - {group}
    ]


def _scheduled(order: Sequence[_Group], operations: Operations) -> list[Kernel]:
    uses = _uses(order)
    waiting = {root: {one for one in operations.found if root in one.reads} for root in uses}
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
                forgotten=tuple(one for one in done if one not in {*over, *unwritten, *operations.kept}),
            )
        )
    return kernels


def _is_extern(group: _Group) -> bool:
    return group.operations[0].kind == "extern"


def _overwritten(
    group: _Group, written: Sequence[Node], waiting: dict[Node, set[Operation]], operations: Operations
) -> list[Node]:
    """Inputs whose bytes an output takes: of the same kind and size, and read by nobody else any more.

    Others of the same kernel count, unless what they make is read by this one: they come before it.
    """
    makers = {output: one for one in group.operations for output in one.outputs}
    taken: list[Node] = []
    for output in written:
        before = _ancestors(makers[output], makers)
        for root in makers[output].reads - set(taken):
            is_free = waiting[root] <= before and _is_ours(root, operations)
            if is_free and root not in makers and _alike(root, output):
                taken.append(root)
                break
    return taken


def _ancestors(operation: Operation, makers: dict[Node, Operation]) -> set[Operation]:
    """Itself and those of its kernel whose results it needs."""
    found: set[Operation] = set()
    waiting = [operation]
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting += [makers[root] for root in one.reads if root in makers]
    return found


def _alike(one: Node, other: Node) -> bool:
    left, right = one.meta.get("val"), other.meta.get("val")
    if not isinstance(left, Tensor) or not isinstance(right, Tensor):
        return False
    return left.dtype == right.dtype and left.numel() == right.numel()
