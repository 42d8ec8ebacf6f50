"""Which rows of the queries see which rows of the keys, as few kernel calls as possible.

Rows are held in chunks: contiguous runs of the true sequence, in ascending order, with gaps between
them when other ranks hold the rest. A pair of chunks is seen in full, not at all, as the causal
triangle, or through a mask. This is arithmetic on lengths: it reads no tensor and never syncs.
"""

import enum
import functools
from typing import NamedTuple


class Chunk(NamedTuple):
    """A contiguous run of the true sequence."""

    start: int
    length: int

    @property
    def end(self) -> int:
        """First position after the run."""
        return self.start + self.length


class Cover(enum.Enum):
    """How much of a block of scores is seen."""

    NONE = "none"
    FULL = "full"
    CAUSAL = "causal"
    MASKED = "masked"


class Task(NamedTuple):
    """One kernel call: rows of the local queries against rows of the local keys."""

    queries: slice
    keys: slice
    cover: Cover


def cover_of(query: Chunk, key: Chunk, window: int | None, *, has_documents: bool) -> Cover:
    """How a chunk of queries sees a chunk of keys; `window` counts the query itself."""
    nearest, furthest = query.start - (key.end - 1), query.end - 1 - key.start
    if furthest < 0 or (window is not None and nearest >= window):
        return Cover.NONE
    if has_documents or (window is not None and furthest >= window):
        return Cover.MASKED
    if nearest >= 0:
        return Cover.FULL
    return Cover.CAUSAL if query == key else Cover.MASKED


class Tiling(NamedTuple):
    """How masked calls are cut: small masks, and few scores computed that no one sees."""

    max_rows: int = 2048
    """Queries per call: enough to fill a GPU, few enough that the triangle's unseen half is skipped."""
    max_elements: int = 1 << 26
    """Scores per call: 128 MiB of bias in 16 bits."""
    align: int = 64
    """Calls begin and end at such rows of the keys, as kernels like it."""


class _Held(NamedTuple):
    """A chunk and the local rows where it lies."""

    chunk: Chunk
    rows: slice


@functools.lru_cache(maxsize=4096)
def plan_tasks(
    query_chunks: tuple[Chunk, ...],
    key_chunks: tuple[Chunk, ...],
    *,
    window: int | None = None,
    has_documents: bool = False,
    tiling: Tiling = Tiling(),  # noqa: B008  (immutable)
) -> tuple[Task, ...]:
    """The calls that cover every visible pair once."""
    if query_chunks == key_chunks and window is None and not has_documents:
        # In ascending order the gaps do not matter: the local triangle is the true one.
        rows = sum(chunk.length for chunk in query_chunks)
        return (Task(slice(0, rows), slice(0, rows), Cover.CAUSAL),)
    tasks: list[Task] = []
    for query in _held(query_chunks):
        row: list[Task] = []
        for key in _held(key_chunks):
            cover = cover_of(query.chunk, key.chunk, window, has_documents=has_documents)
            if cover is Cover.MASKED:
                row.extend(_tiles(query, key, window, tiling))
            elif cover is not Cover.NONE:
                row = _join_keys(row, Task(query.rows, key.rows, cover))
        tasks = _join_queries(tasks, row)
    return tuple(tasks)


def _held(chunks: tuple[Chunk, ...]) -> list[_Held]:
    held, offset = [], 0
    for chunk in chunks:
        held.append(_Held(chunk, slice(offset, offset + chunk.length)))
        offset += chunk.length
    return held


def _tiles(query: _Held, key: _Held, window: int | None, tiling: Tiling) -> list[Task]:
    """Bands of queries, each against the keys that its first and last row can reach."""
    step = max(1, min(tiling.max_rows, tiling.max_elements // key.chunk.length))
    tasks = []
    for at in range(0, query.chunk.length, step):
        end = min(at + step, query.chunk.length)
        reach = 0 if window is None else max(0, query.chunk.start + at - window + 1 - key.chunk.start)
        low = reach - reach % tiling.align
        seen = query.chunk.start + end - key.chunk.start
        high = min(key.chunk.length, seen + -seen % tiling.align)
        if low < high:
            queries = slice(query.rows.start + at, query.rows.start + end)
            tasks.append(Task(queries, slice(key.rows.start + low, key.rows.start + high), Cover.MASKED))
    return tasks


def _join_keys(row: list[Task], task: Task) -> list[Task]:
    """Neighbouring keys that the same queries see in full are one call."""
    last = row[-1] if row else None
    if last and last.cover is task.cover is Cover.FULL and last.keys.stop == task.keys.start:
        return [*row[:-1], last._replace(keys=slice(last.keys.start, task.keys.stop))]
    return [*row, task]


def _join_queries(tasks: list[Task], row: list[Task]) -> list[Task]:
    """Neighbouring queries that see the same keys in full are one call."""
    joined = list(tasks)
    for task in row:
        above = next((i for i, old in enumerate(joined) if _stacks(old, task)), None)
        if above is None:
            joined.append(task)
        else:
            joined[above] = task._replace(queries=slice(joined[above].queries.start, task.queries.stop))
    return joined


def _stacks(upper: Task, lower: Task) -> bool:
    both_full = upper.cover is lower.cover is Cover.FULL
    return both_full and upper.keys == lower.keys and upper.queries.stop == lower.queries.start
