"""The kernel calls of an attention: which query rows see which key rows, in as few calls as possible.

Local rows are chunks: contiguous runs of the sequence, in ascending order, with gaps where other ranks hold
the rest. A pair of chunks is seen in full, not at all, causally, or through a mask. All of this is arithmetic
on lengths: it reads no tensor and has no host sync.
"""

import enum
import functools
from typing import NamedTuple


class Chunk(NamedTuple):
    """A contiguous run of the sequence."""

    start: int
    length: int

    @property
    def end(self) -> int:
        """First position after the chunk."""
        return self.start + self.length


class Coverage(enum.Enum):
    """How much of a block of scores is visible."""

    NONE = "none"
    FULL = "full"
    CAUSAL = "causal"
    MASKED = "masked"


class Task(NamedTuple):
    """One kernel call: local query rows against local key rows."""

    queries: slice
    keys: slice
    coverage: Coverage


def coverage_of(query: Chunk, key: Chunk, window: int | None, *, has_documents: bool) -> Coverage:
    """How a chunk of queries sees a chunk of keys; `window` counts the query itself."""
    nearest, furthest = query.start - (key.end - 1), query.end - 1 - key.start
    if furthest < 0 or (window is not None and nearest >= window):
        return Coverage.NONE
    if has_documents or (window is not None and furthest >= window):
        return Coverage.MASKED
    if nearest >= 0:
        return Coverage.FULL
    return Coverage.CAUSAL if query == key else Coverage.MASKED


class Tiling(NamedTuple):
    """Sizes of masked calls: small masks, and few scores computed only to be masked."""

    max_rows: int = 2048
    """Queries per call: enough to fill a GPU, few enough that the triangle's masked_score half is skipped."""
    max_elements: int = 1 << 26
    """Scores per call: 128 MiB of bias in 16 bits."""
    align: int = 64
    """Calls begin and end at multiples of this many key rows, for the kernels."""


class _PlacedChunk(NamedTuple):
    """A chunk and its local rows."""

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
    """The calls that coverage every visible pair once."""
    if query_chunks == key_chunks and window is None and not has_documents:
        # In ascending order gaps do not matter: the causal mask over local rows is the right one.
        rows = sum(chunk.length for chunk in query_chunks)
        return (Task(slice(0, rows), slice(0, rows), Coverage.CAUSAL),)
    tasks: list[Task] = []
    for query in _placed(query_chunks):
        row: list[Task] = []
        for key in _placed(key_chunks):
            coverage = coverage_of(query.chunk, key.chunk, window, has_documents=has_documents)
            if coverage is Coverage.MASKED:
                row.extend(_tiles(query, key, window, tiling))
            elif coverage is not Coverage.NONE:
                row = _merge_keys(row, Task(query.rows, key.rows, coverage))
        tasks = _merge_queries(tasks, row)
    return tuple(tasks)


def _placed(chunks: tuple[Chunk, ...]) -> list[_PlacedChunk]:
    placed, offset = [], 0
    for chunk in chunks:
        placed.append(_PlacedChunk(chunk, slice(offset, offset + chunk.length)))
        offset += chunk.length
    return placed


def _tiles(query: _PlacedChunk, key: _PlacedChunk, window: int | None, tiling: Tiling) -> list[Task]:
    """Bands of queries, each against the keys between the first and the last one that its rows can see."""
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
            tasks.append(Task(queries, slice(key.rows.start + low, key.rows.start + high), Coverage.MASKED))
    return tasks


def _merge_keys(row: list[Task], task: Task) -> list[Task]:
    """The row of calls with another one; adjacent keys that the same queries see in full become one call."""
    last = row[-1] if row else None
    if last and last.coverage is task.coverage is Coverage.FULL and last.keys.stop == task.keys.start:
        return [*row[:-1], last._replace(keys=slice(last.keys.start, task.keys.stop))]
    return [*row, task]


def _merge_queries(tasks: list[Task], row: list[Task]) -> list[Task]:
    """The calls with another row; adjacent queries that see the same keys in full become one call."""
    merged = list(tasks)
    for task in row:
        above = next((i for i, old in enumerate(merged) if _stacks(old, task)), None)
        if above is None:
            merged.append(task)
        else:
            merged[above] = task._replace(queries=slice(merged[above].queries.start, task.queries.stop))
    return merged


def _stacks(upper: Task, lower: Task) -> bool:
    both_full = upper.coverage is lower.coverage is Coverage.FULL
    return both_full and upper.keys == lower.keys and upper.queries.stop == lower.queries.start
