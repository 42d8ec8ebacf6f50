"""A model of CUDA's caching allocator: what it reserves for a sequence of requests and releases.

Requests are rounded up to 512 B. Those up to 1 MiB are served from segments of 2 MiB, larger ones below
10 MiB from segments of 20 MiB, the rest from a segment of their own, rounded up to 2 MiB. The smallest free
block that is large enough is taken, and split when enough is left over. Freed blocks merge with their free
neighbours and stay reserved: reserved bytes never fall. Every stream has pools of its own.

With expandable segments a pool is one segment that grows at its end, in pages of 2 MiB (small) or 20 MiB
(large), so free bytes before the end are reused whatever the requests were. A free block at the end counts
as all the space it could grow into: it is taken last.
"""

import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field

MIB = 2**20
MIN_BLOCK = 512
SMALL_REQUEST = MIB
SMALL_SEGMENT = 2 * MIB
MEDIUM_REQUEST = 10 * MIB
MEDIUM_SEGMENT = 20 * MIB
LARGE_ROUNDING = 2 * MIB


@dataclass(slots=True)
class _Block:
    """A contiguous range of a segment, linked to its neighbours in the same segment."""

    start: int
    size: int
    is_free: bool = True
    before: "_Block | None" = None
    after: "_Block | None" = None


@dataclass
class _Pool:
    """Free blocks of one size class on one stream, the smallest first."""

    is_small: bool
    free: list[tuple[int, int]] = field(default_factory=list)
    by_start: dict[int, _Block] = field(default_factory=dict)
    tail: _Block | None = None
    """The last block of an expandable segment; None for segments of fixed size."""

    def add(self, block: _Block) -> None:
        block.is_free = True
        self.by_start[block.start] = block
        bisect.insort(self.free, (block.size, block.start))

    def remove(self, block: _Block) -> None:
        block.is_free = False
        del self.free[bisect.bisect_left(self.free, (block.size, block.start))]
        del self.by_start[block.start]

    def best(self, size: int) -> _Block | None:
        """The smallest block that is large enough; the end of an expandable segment only as a last resort."""
        index = bisect.bisect_left(self.free, (size, -1))
        found = [self.by_start[start] for _, start in self.free[index : index + 2]]
        return found[-1] if found and found[0] is self.tail else next(iter(found), None)


class CachingAllocator:
    """Serves requests; `reserved_bytes` and `allocated_bytes` are counted as torch.cuda counts them."""

    def __init__(self, *, is_expandable: bool = False) -> None:
        self.is_expandable = is_expandable
        self.reserved_bytes = self.allocated_bytes = 0
        self._pools: dict[tuple[bool, int], _Pool] = {}
        self._next_start = 0

    def malloc(self, num_bytes: int, stream: int = 0) -> tuple[_Pool, _Block]:
        """A block for this many bytes; `free` takes it back."""
        size = max(MIN_BLOCK, -(-num_bytes // MIN_BLOCK) * MIN_BLOCK)
        is_small = size <= SMALL_REQUEST
        pool = self._pools.setdefault((is_small, stream), _Pool(is_small))
        block = pool.best(size)
        if block is None:
            block = self._grow(pool, size) if self.is_expandable else self._new_segment(pool, size)
        pool.remove(block)
        self._split(pool, block, size)
        self.allocated_bytes += block.size
        return pool, block

    def free(self, handle: tuple[_Pool, _Block]) -> None:
        """Release a block; it merges with its free neighbours."""
        pool, block = handle
        self.allocated_bytes -= block.size
        for other in (block.before, block.after):
            if other is not None and other.is_free:
                pool.remove(other)
                self._merge(pool, block, other)
        pool.add(block)

    def _new_segment(self, pool: _Pool, size: int) -> _Block:
        if pool.is_small:
            length = SMALL_SEGMENT
        elif size < MEDIUM_REQUEST:
            length = MEDIUM_SEGMENT
        else:
            length = -(-size // LARGE_ROUNDING) * LARGE_ROUNDING
        block = _Block(self._next_start, length)
        self._next_start += 2 * length  # a gap, so that segments never merge
        self.reserved_bytes += length
        pool.add(block)
        return block

    def _grow(self, pool: _Pool, size: int) -> _Block:
        page = SMALL_SEGMENT if pool.is_small else MEDIUM_SEGMENT
        tail = pool.tail
        if tail is None:
            tail = _Block(self._next_start, 0)
            self._next_start += 2**50  # a range of addresses larger than any device
        have = tail.size if tail.is_free else 0
        added = -(-(size - have) // page) * page
        self.reserved_bytes += added
        if pool.tail is not None and tail.is_free:
            pool.remove(tail)
            tail.size += added
        elif pool.tail is None:
            tail.size = added
        else:
            grown = _Block(tail.start + tail.size, added, before=tail)
            tail.after = grown
            tail = grown
        pool.tail = tail
        pool.add(tail)
        return tail

    def _split(self, pool: _Pool, block: _Block, size: int) -> None:
        rest = block.size - size
        fine = pool.is_small or self.is_expandable
        if rest < MIN_BLOCK or (not fine and rest <= SMALL_REQUEST):
            return
        left_over = _Block(block.start + size, rest, before=block, after=block.after)
        if block.after is not None:
            block.after.before = left_over
        block.after, block.size = left_over, size
        if pool.tail is block:
            pool.tail = left_over
        pool.add(left_over)

    def _merge(self, pool: _Pool, block: _Block, other: _Block) -> None:
        """Merge `other`, a neighbour, into `block`."""
        if other.start < block.start:
            block.start, block.before = other.start, other.before
            if block.before is not None:
                block.before.after = block
        else:
            block.after = other.after
            if block.after is not None:
                block.after.before = block
        block.size += other.size
        if pool.tail is other:
            pool.tail = block


@dataclass(frozen=True)
class Request:
    """An allocation (num_bytes > 0) or a release (num_bytes < 0) of storage `number`."""

    number: int
    num_bytes: int
    stream: int = 0


def replay(requests: Iterable[Request], *, is_expandable: bool) -> CachingAllocator:
    """The allocator after it has served these requests."""
    allocator = CachingAllocator(is_expandable=is_expandable)
    handles: dict[int, tuple[_Pool, _Block]] = {}
    for request in requests:
        if request.num_bytes > 0:
            handles[request.number] = allocator.malloc(request.num_bytes, request.stream)
        else:
            allocator.free(handles.pop(request.number))
    return allocator
