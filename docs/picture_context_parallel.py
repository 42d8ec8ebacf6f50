"""The picture of docs/concepts/context_parallel.md: zig-zag chunks, and the ring as one rank computes it."""

from picture_card import MARGIN, RANK_COLOURS, Card

from meshwright.parallel.cp.zigzag import chunks_of

WIDTH, HEIGHT = 960, 452
CELL = 32.0
LEFT, TOP = 112.0, 124.0
RING_LEFT = 492.0
STEP = 112.0
SHOWN_RANK = 1


def context_parallel(cp: int) -> str:
    """All blocks of attention scores by rank, and the steps of the ring on one rank."""
    card = Card(
        WIDTH,
        HEIGHT,
        title=f"Context parallel: cp {cp}, zig-zag",
        subtitle="a cell: the scores of a chunk of queries and a chunk of keys, in the colour of its rank",
    )
    chunks = [_chunks(rank, cp) for rank in range(cp)]
    _all_blocks(card, chunks)
    for step in range(cp):
        source = (SHOWN_RANK - step) % cp
        _ring_step(card, step, chunks[SHOWN_RANK], chunks[source], source)
    _ring(card, cp)
    return card.svg()


def _chunks(rank: int, cp: int) -> tuple[int, int]:
    """The two chunks of a rank, by their number in the sequence."""
    first, second = chunks_of(rank, cp, local_length=2)
    return first.start, second.start


def _all_blocks(card: Card, chunks: list[tuple[int, int]]) -> None:
    owner = {chunk: rank for rank, pair in enumerate(chunks) for chunk in pair}
    count = len(owner)
    card.text(LEFT + count * CELL / 2, TOP - 26, "chunk of the keys", anchor="middle", fill="soft")
    card.text(MARGIN, TOP - 10, "queries", fill="soft")
    for chunk in range(count):
        middle = (chunk + 0.5) * CELL
        card.text(LEFT + middle, TOP - 10, str(chunk), anchor="middle", fill="soft")
        card.text(MARGIN + 12, TOP + middle + 4, str(chunk), anchor="end", fill="soft")
        card.labelled_box(
            MARGIN + 24, TOP + middle - 11, 40, 22, fill=RANK_COLOURS[owner[chunk]], label=f"r{owner[chunk]}"
        )
        for other in range(count):
            _block(card, LEFT + other * CELL, TOP + chunk * CELL, CELL, owner[chunk], chunk - other)
    bottom = TOP + count * CELL
    card.text(LEFT, bottom + 24, "blocks per rank (a triangle is half a block):", fill="soft")
    costs = [f"r{rank}: {sum(chunk + 0.5 for chunk in pair):g}" for rank, pair in enumerate(chunks)]
    card.text(LEFT, bottom + 43, ", ".join(costs), weight=600)


def _block(card: Card, x: float, y: float, size: float, rank: int, distance: int) -> None:
    """One block of scores: full below the diagonal, a triangle on it, empty above."""
    colour = RANK_COLOURS[rank]
    card.box(x, y, size - 1, size - 1, fill=colour if distance > 0 else "empty", radius=1)
    if distance == 0:
        card.shape(((x, y), (x, y + size - 1), (x + size - 1, y + size - 1)), fill=colour)


def _ring_step(card: Card, step: int, queries: tuple[int, int], keys: tuple[int, int], source: int) -> None:
    """The blocks that the shown rank computes with the keys of one source."""
    left, top = RING_LEFT + step * STEP, TOP + 16
    card.text(left + CELL, top - 42, f"step {step}", anchor="middle", weight=600, size=13)
    card.text(left + CELL, top - 25, f"keys of r{source}", anchor="middle", fill="soft")
    for column, key in enumerate(keys):
        card.text(left + (column + 0.5) * CELL, top - 6, str(key), anchor="middle", fill="soft")
        for row, query in enumerate(queries):
            _block(card, left + column * CELL, top + row * CELL, CELL, SHOWN_RANK, query - key)
            if step == 0:
                card.text(left - 8, top + (row + 0.5) * CELL + 4, str(query), anchor="end", fill="soft")
    if source == SHOWN_RANK:
        notes = "causal", "triangle"
    elif source < SHOWN_RANK:
        notes = "all queries,", "first key chunk"
    else:
        notes = "last queries,", "both key chunks"
    for index, note in enumerate(notes):
        card.text(left + CELL, top + 2 * CELL + 20 + 16 * index, note, anchor="middle", fill="soft")


def _ring(card: Card, cp: int) -> None:
    """The ring of ranks, and what they send."""
    top = TOP + 164
    card.text(
        RING_LEFT - 20, top - 18, "Each step overlaps with sending keys and values on", weight=600, size=13
    )
    for rank in range(cp):
        x = RING_LEFT - 20 + rank * STEP
        card.labelled_box(x, top, 72, 34, fill=RANK_COLOURS[rank], label=f"rank {rank}")
        if rank + 1 < cp:
            card.arrow(x + 76, top + 17, x + STEP - 4, top + 17)
    first, last, below = RING_LEFT + 16, RING_LEFT + 16 + (cp - 1) * STEP, top + 62
    card.line(last, top + 38, last, below, width=1.4)
    card.line(last, below, first, below, width=1.4)
    card.arrow(first, below, first, top + 38)
    middle = (first + last) / 2
    card.text(middle, below + 20, f"forward: k, v, {cp - 1} times", anchor="middle", fill="soft")
    card.text(
        middle, below + 37, "backward: k, v again, and dk, dv one step later", anchor="middle", fill="soft"
    )
