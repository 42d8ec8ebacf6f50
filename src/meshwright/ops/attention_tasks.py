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


@functools.lru_cache(maxsize=4096)
def plan_tasks(
    query_chunks: tuple[Chunk, ...],
    key_chunks: tuple[Chunk, ...],
    *,
    window: int | None = None,
    has_documents: bool = False,
    max_mask_elements: int = 1 << 60,
) -> tuple[Task, ...]:
    """The calls that cover every visible pair once; a masked call has at most `max_mask_elements` scores."""
    unmasked = window is None and not has_documents
    if unmasked and query_chunks == key_chunks:
        # In ascending order the gaps do not matter: the local triangle is the true one.
        rows = sum(chunk.length for chunk in query_chunks)
        return (Task(slice(0, rows), slice(0, rows), Cover.CAUSAL),)
    tasks: list[Task] = []
    for query, queries in zip(query_chunks, _local_slices(query_chunks), strict=True):
        row = _tasks_of_one_chunk(query, queries, key_chunks, window, has_documents=has_documents)
        tasks = _join_queries(tasks, row)
    return tuple(piece for task in tasks for piece in _tile(task, max_mask_elements))


def _local_slices(chunks: tuple[Chunk, ...]) -> list[slice]:
    slices, offset = [], 0
    for chunk in chunks:
        slices.append(slice(offset, offset + chunk.length))
        offset += chunk.length
    return slices


def _tasks_of_one_chunk(
    query: Chunk,
    queries: slice,
    key_chunks: tuple[Chunk, ...],
    window: int | None,
    *,
    has_documents: bool,
) -> list[Task]:
    tasks: list[Task] = []
    for key, keys in zip(key_chunks, _local_slices(key_chunks), strict=True):
        cover = cover_of(query, key, window, has_documents=has_documents)
        last = tasks[-1] if tasks else None
        if cover is Cover.FULL and last and last.cover is Cover.FULL and last.keys.stop == keys.start:
            tasks[-1] = last._replace(keys=slice(last.keys.start, keys.stop))
        elif cover is not Cover.NONE:
            tasks.append(Task(queries, keys, cover))
    return tasks


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
    both_full = upper.cover is Cover.FULL and lower.cover is Cover.FULL
    return both_full and upper.keys == lower.keys and upper.queries.stop == lower.queries.start


def _tile(task: Task, max_mask_elements: int) -> list[Task]:
    """Cut a masked call into bands of queries whose masks stay small."""
    if task.cover is not Cover.MASKED:
        return [task]
    step = max(1, max_mask_elements // (task.keys.stop - task.keys.start))
    starts = range(task.queries.start, task.queries.stop, step)
    return [task._replace(queries=slice(at, min(at + step, task.queries.stop))) for at in starts]
