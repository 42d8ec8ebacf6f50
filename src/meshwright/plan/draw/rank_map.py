"""Pictures of the rank map: which rank stands where on every axis, and on which node."""

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from meshwright.spec.parallel import MESH_ORDER, ParallelSpec

NODES_SHOWN = 8
CELL_WIDTH = 7
_STAGE_COLOURS = ("#cfe3f7", "#fde3c8", "#d9efd9", "#e9dcf3", "#fbd9df", "#fff1b8", "#d5eeee", "#e6e0d4")


@dataclass(frozen=True)
class RankMap:
    """A layout laid over nodes of equal size, rank after rank."""

    parallel: ParallelSpec
    ranks_per_node: int

    @property
    def num_nodes(self) -> int:
        """Nodes that hold at least one rank."""
        return -(-self.parallel.num_ranks // self.ranks_per_node)

    @property
    def axes(self) -> list[str]:
        """The axes that are cut, from outer to inner; ep last, because it borrows ranks of the others."""
        cut = [axis for axis in MESH_ORDER if getattr(self.parallel, axis) > 1]
        return cut + (["ep"] if self.parallel.ep > 1 else [])

    def ranks_of_node(self, node: int) -> range:
        """The ranks on one node."""
        first = node * self.ranks_per_node
        return range(first, min(first + self.ranks_per_node, self.parallel.num_ranks))


def coordinates(parallel: ParallelSpec, rank: int) -> dict[str, int]:
    """The place of a rank on every axis of the mesh, and among the ranks that share out the experts."""
    found: dict[str, int] = {}
    for axis in reversed(MESH_ORDER):
        rank, found[axis] = divmod(rank, getattr(parallel, axis))
    found["ep"] = (found["dp_shard"] * parallel.cp + found["cp"]) % parallel.ep
    return found


def group_of(parallel: ParallelSpec, rank: int, axis: str) -> list[int]:
    """The ranks that talk to this one along an axis: equal on all others."""
    here = coordinates(parallel, rank)
    if axis == "ep":  # consecutive places on dp_shard x cp, with the rest equal
        place = here["dp_shard"] * parallel.cp + here["cp"]
        begin = place - place % parallel.ep
        return [rank + (other - place) * parallel.tp for other in range(begin, begin + parallel.ep)]
    stride = 1
    for inner in MESH_ORDER[MESH_ORDER.index(axis) + 1 :]:
        stride *= getattr(parallel, inner)
    first = rank - here[axis] * stride
    return [first + index * stride for index in range(getattr(parallel, axis))]


def nodes_spanned(drawn: RankMap, axis: str) -> int:
    """The most nodes that one group of an axis touches."""
    parallel = drawn.parallel
    return max(
        len({rank // drawn.ranks_per_node for rank in group_of(parallel, first, axis)})
        for first in range(parallel.num_ranks)
        if coordinates(parallel, first)[axis] == 0
    )


def draw_text(drawn: RankMap) -> str:
    """The map for a terminal, readable without colour."""
    parallel = drawn.parallel
    lines = [_title(drawn), ""]
    for node in range(min(drawn.num_nodes, NODES_SHOWN)):
        lines += [*_node_lines(drawn, node), ""]
    if drawn.num_nodes > NODES_SHOWN:
        lines += [f"... and {drawn.num_nodes - NODES_SHOWN} more nodes in the same manner", ""]
    for axis in drawn.axes:
        group = group_of(parallel, 0, axis)
        shown = " ".join(map(str, group[:8])) + (" ..." if len(group) > 8 else "")
        spanned = nodes_spanned(drawn, axis)
        where = "inside a node" if spanned == 1 else f"across {spanned} nodes"
        lines.append(f"{axis:>12}  {where:<16}  the group of rank 0: {shown}")
    return "\n".join(lines)


def _title(drawn: RankMap) -> str:
    parallel = drawn.parallel
    degrees = (
        " x ".join(f"{axis} {getattr(parallel, axis)}" for axis in drawn.axes if axis != "ep") or "one device"
    )
    borrowed = f", ep {parallel.ep} inside dp_shard x cp" if parallel.ep > 1 else ""
    ranks = "rank" if parallel.num_ranks == 1 else "ranks"
    return f"{parallel.num_ranks} {ranks} on {drawn.num_nodes} x {drawn.ranks_per_node}: {degrees}{borrowed}"


def _node_lines(drawn: RankMap, node: int) -> Iterator[str]:
    ranks = drawn.ranks_of_node(node)
    yield f"node {node}"
    yield "        rank" + "".join(f"{rank:>{CELL_WIDTH}}" for rank in ranks)
    for axis in drawn.axes:
        places = [coordinates(drawn.parallel, rank)[axis] for rank in ranks]
        yield f"{axis:>12}" + "".join(f"{place:>{CELL_WIDTH}}" for place in places)


def draw_svg(drawn: RankMap) -> str:
    """The map as a picture: one box per rank, coloured by pipeline stage, tp neighbours side by side."""
    shown = min(drawn.num_nodes, NODES_SHOWN)
    columns = min(drawn.ranks_per_node, 8)
    rows = -(-drawn.ranks_per_node // columns)
    cell, line = 104, 18
    box_height = 34 + line * max(1, len(drawn.axes))
    node_height = 40 + rows * (box_height + 10)
    width, height = 40 + columns * (cell + 8), 64 + shown * (node_height + 14) + 24
    parts = [_label(20, 34, _title(drawn), size=17, weight=600)]
    for node in range(shown):
        top = 56 + node * (node_height + 14)
        parts.append(_rect(14, top, width - 28, node_height, "#f7f8fa", "#c8ced6", radius=10))
        parts.append(_label(26, top + 24, f"node {node}", size=13, weight=600))
        for index, rank in enumerate(drawn.ranks_of_node(node)):
            x = 24 + index % columns * (cell + 8)
            y = top + 36 + index // columns * (box_height + 10)
            parts += _rank_box(drawn, rank, (x, y, cell, box_height), line)
    if drawn.num_nodes > shown:
        more = f"... and {drawn.num_nodes - shown} more nodes in the same manner"
        parts.append(_label(26, height - 14, more, size=13, weight=400))
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="system-ui, sans-serif">'
    return "\n".join([head, _rect(0, 0, width, height, "#ffffff", "none"), *parts, "</svg>", ""])


def _rank_box(drawn: RankMap, rank: int, box: tuple[int, int, int, int], line: int) -> Iterator[str]:
    x, y, width, height = box
    places = coordinates(drawn.parallel, rank)
    colour = _STAGE_COLOURS[places["pp"] % len(_STAGE_COLOURS)]
    yield _rect(x, y, width, height, colour, "#8a94a0", radius=6)
    yield _label(x + 10, y + 22, f"rank {rank}", size=14, weight=600)
    for index, axis in enumerate(drawn.axes):
        yield _label(x + 10, y + 42 + index * line, f"{axis} {places[axis]}", size=12, weight=400)


def _rect(x: float, y: float, width: float, height: float, fill: str, stroke: str, *, radius: int = 0) -> str:
    place = f'x="{x}" y="{y}" width="{width}" height="{height}" rx="{radius}"'
    return f'<rect {place} fill="{fill}" stroke="{stroke}"/>'


def _label(x: float, y: float, words: str, *, size: int, weight: int) -> str:
    style = f'font-size="{size}" font-weight="{weight}" fill="#1c232b"'
    return f'<text x="{x}" y="{y}" {style}>{escape(words)}</text>'
