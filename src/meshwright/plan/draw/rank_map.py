"""The rank map: the coordinate of every rank on every mesh axis, and its node; as text and as SVG."""

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright import svg
from meshwright.spec.parallel import MESH_ORDER, ParallelSpec, mesh_coordinates

NODES_SHOWN = 8
CELL_WIDTH = 7
_STAGE_COLOURS = ("#cfe3f7", "#fde3c8", "#d9efd9", "#e9dcf3", "#fbd9df", "#fff1b8", "#d5eeee", "#e6e0d4")


@dataclass(frozen=True)
class RankMap:
    """A layout on nodes of equal size, in the order of ranks."""

    parallel: ParallelSpec
    ranks_per_node: int

    @property
    def num_nodes(self) -> int:
        """Number of nodes with at least one rank."""
        return -(-self.parallel.num_ranks // self.ranks_per_node)

    @property
    def axes(self) -> list[str]:
        """The axes with a degree above one, from outer to inner; ep last, as it borrows ranks of others."""
        axes = [axis for axis in MESH_ORDER if getattr(self.parallel, axis) > 1]
        return axes + (["ep"] if self.parallel.ep > 1 else [])

    def ranks_of_node(self, node: int) -> range:
        """The ranks on one node."""
        first = node * self.ranks_per_node
        return range(first, min(first + self.ranks_per_node, self.parallel.num_ranks))


def coordinates(parallel: ParallelSpec, rank: int) -> dict[str, int]:
    """The coordinate of a rank on every mesh axis, and on ep."""
    found = mesh_coordinates(parallel, rank)
    found["ep"] = (found["dp_shard"] * parallel.cp + found["cp"]) % parallel.ep
    return found


def group_of(parallel: ParallelSpec, rank: int, axis: str) -> list[int]:
    """The group of this rank along an axis: the ranks with the same coordinates on all other axes."""
    here = coordinates(parallel, rank)
    if axis == "ep":  # consecutive coordinates on dp_shard x cp, all others equal
        place = here["dp_shard"] * parallel.cp + here["cp"]
        begin = place - place % parallel.ep
        return [rank + (other - place) * parallel.tp for other in range(begin, begin + parallel.ep)]
    stride = 1
    for inner in MESH_ORDER[MESH_ORDER.index(axis) + 1 :]:
        stride *= getattr(parallel, inner)
    first = rank - here[axis] * stride
    return [first + index * stride for index in range(getattr(parallel, axis))]


def nodes_spanned(drawn: RankMap, axis: str) -> int:
    """The most nodes that one group of an axis spans."""
    parallel = drawn.parallel
    return max(
        len({rank // drawn.ranks_per_node for rank in group_of(parallel, first, axis)})
        for first in range(parallel.num_ranks)
        if coordinates(parallel, first)[axis] == 0
    )


def draw_text(drawn: RankMap) -> str:
    """The map as text, readable without colour."""
    parallel = drawn.parallel
    lines = [_title(drawn), ""]
    for node in range(min(drawn.num_nodes, NODES_SHOWN)):
        lines += [*_node_lines(drawn, node), ""]
    if drawn.num_nodes > NODES_SHOWN:
        lines += [_more_nodes(drawn), ""]
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


def _more_nodes(drawn: RankMap) -> str:
    return f"... and {drawn.num_nodes - NODES_SHOWN} more nodes in the same order"


def _node_lines(drawn: RankMap, node: int) -> Iterator[str]:
    ranks = drawn.ranks_of_node(node)
    yield f"node {node}"
    yield "        rank" + "".join(f"{rank:>{CELL_WIDTH}}" for rank in ranks)
    for axis in drawn.axes:
        found = [coordinates(drawn.parallel, rank)[axis] for rank in ranks]
        yield f"{axis:>12}" + "".join(f"{coordinate:>{CELL_WIDTH}}" for coordinate in found)


CELL, LINE_HEIGHT, GAP, BOXES_PER_ROW = 104, 18, 8, 8


def draw_svg(drawn: RankMap) -> str:
    """The map as an SVG file: one box per rank, coloured by pipeline rank, tp neighbours side by side."""
    columns = min(drawn.ranks_per_node, BOXES_PER_ROW)
    box_height = 34 + LINE_HEIGHT * max(1, len(drawn.axes))
    node_height = 40 + -(-drawn.ranks_per_node // columns) * (box_height + 10)
    num_shown = min(drawn.num_nodes, NODES_SHOWN)
    width, height = 40 + columns * (CELL + GAP), 88 + num_shown * (node_height + 14)
    parts = [svg.text(20, 34, _title(drawn), size=17, weight=600)]
    for node in range(num_shown):
        top = 56 + node * (node_height + 14)
        parts.append(svg.rect(14, top, width - 28, node_height, rx=10, fill="panel", stroke="edge"))
        parts.append(svg.text(26, top + 24, f"node {node}", weight=600))
        for index, rank in enumerate(drawn.ranks_of_node(node)):
            row, column = divmod(index, columns)
            place = (24 + column * (CELL + GAP), top + 36 + row * (box_height + 10))
            parts += _rank_box(drawn, rank, place, box_height)
    if drawn.num_nodes > num_shown:
        parts.append(svg.text(26, height - 14, _more_nodes(drawn), fill="soft"))
    return svg.document(parts, width, height, label=_title(drawn))


def _rank_box(drawn: RankMap, rank: int, place: tuple[float, float], height: float) -> Iterator[str]:
    x, y = place
    at = coordinates(drawn.parallel, rank)
    fill = _STAGE_COLOURS[at["pp"] % len(_STAGE_COLOURS)]
    yield svg.rect(x, y, CELL, height, rx=6, fill=fill, stroke="edge")
    yield svg.text(x + 10, y + 22, f"rank {rank}", size=14, weight=600, fill=svg.ON_LIGHT)
    for index, axis in enumerate(drawn.axes):
        label = f"{axis} {at[axis]}"
        yield svg.text(x + 10, y + 42 + index * LINE_HEIGHT, label, size=12, fill=svg.ON_LIGHT)
