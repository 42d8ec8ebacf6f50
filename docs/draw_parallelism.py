"""Draws the pictures of docs/concepts from the program itself: `python docs/draw_parallelism.py`.

The layers of a stage, the coordinates of a rank and the timeline of a schedule come from the program. A test
compares the committed files with what this script writes.
"""

from itertools import groupby
from pathlib import Path

from picture_card import LIGHT_COLOURS, MARGIN, RANK_COLOURS, Card
from picture_context_parallel import context_parallel

from meshwright.plan.draw.schedule import draw_svg, picture
from meshwright.plan.workload.schedules import PipelineShape
from meshwright.spec import ParallelSpec
from meshwright.spec.families import family
from meshwright.spec.stages import layer_costs, stage_layers
from meshwright.svg import ON_LIGHT

DOCS = Path(__file__).parent
WIDTH = 960


def main() -> None:
    """Write every picture."""
    for name, text in pictures().items():
        (DOCS / name).write_text(text)


def pictures() -> dict[str, str]:
    """File under docs -> text of each picture."""
    return {
        "pictures/axes.svg": axes(),
        "pictures/mesh.svg": mesh(ParallelSpec(pp=2, dp_shard=2, zero=1, cp=2, tp=2, ep=2), ranks_per_node=8),
        "pictures/data_parallel.svg": data_parallel(4),
        "pictures/tensor_parallel.svg": tensor_parallel(),
        "pictures/expert_parallel.svg": expert_parallel(),
        "concepts/context_parallel.svg": context_parallel(4),
        "pictures/stages.svg": stages("llama-3.1-8b", 4),
        "concepts/schedule_1f1b.svg": draw_svg(picture("1f1b", PipelineShape(4, 1, 8))),
        "pictures/schedule_interleaved_1f1b.svg": draw_svg(
            picture("interleaved_1f1b", PipelineShape(4, 2, 8))
        ),
        "concepts/schedule_zbv.svg": draw_svg(picture("zbv", PipelineShape(4, 2, 8))),
    }


# What each axis shards ----------------------------------------------------------------------------------


def axes() -> str:
    """The batch sharded by dp and cp, the model by pp, tp and ep."""
    card = Card(
        WIDTH, 420, title="What each axis shards", subtitle="every axis at degree 2; equal colour, same rank"
    )
    _batch(card, left=120, top=132)
    _model(card, left=470, top=132)
    _routed_layer(card, left=740, top=132)
    return card.svg()


def _batch(card: Card, *, left: float, top: float) -> None:
    cell, rows = 32, 6
    card.text(left, 96, "a batch: sequences x positions", weight=600)
    for row in range(rows):
        for chunk in range(8):
            cp_rank = 0 if chunk // 2 in (0, 3) else 1
            colours = RANK_COLOURS if cp_rank == 0 else LIGHT_COLOURS
            x, y = left + chunk * cell, top + row * cell
            card.box(x, y, cell - 1, cell - 1, fill=colours[row * 2 // rows], radius=1)
    card.side_bracket(left - 8, top, top + 3 * cell - 4, "dp 0")
    card.side_bracket(left - 8, top + 3 * cell + 2, top + rows * cell - 2, "dp 1")
    for first, last, name in ((0, 2, "cp 0"), (2, 6, "cp 1"), (6, 8, "cp 0")):
        card.bracket(left + first * cell + 1, left + last * cell - 3, top - 8, name)
    lines = (
        ("dp", "different sequences"),
        ("cp", "different parts of every sequence, in"),
        ("", "pairs from both ends: equal causal FLOPs"),
    )
    _below(card, left, top + rows * cell, *lines)


def _model(card: Card, *, left: float, top: float) -> None:
    card.text(left, 96, "the model: layers x width", weight=600)
    for layer in range(8):
        y = top + layer * 22 + (16 if layer >= 4 else 0)
        for part in range(2):
            colours = RANK_COLOURS if layer < 4 else LIGHT_COLOURS
            card.box(left + part * 82, y, 80, 19, fill=colours[2 + part], radius=1)
    card.side_bracket(left - 8, top, top + 85, "pp 0")
    card.side_bracket(left - 8, top + 104, top + 189, "pp 1")
    card.bracket(left, left + 78, top - 8, "tp 0")
    card.bracket(left + 84, left + 162, top - 8, "tp 1")
    lines = ("pp", "different layers"), ("tp", "different heads and MLP"), ("", "columns of every layer")
    _below(card, left, top + 192, *lines)


def _routed_layer(card: Card, *, left: float, top: float) -> None:
    card.text(left, 96, "a routed layer: experts", weight=600)
    for expert in range(8):
        x, y = left + expert % 4 * 42, top + expert // 4 * 104
        card.labelled_box(x, y, 38, 46, fill=RANK_COLOURS[expert // 4], label=f"{expert}")
    card.bracket(left, left + 164, top - 8, "ep 0")
    card.bracket(left, left + 164, top + 96, "ep 1")
    lines = ("ep", "different experts; borrows"), ("", "the ranks of dp_shard and"), ("", "cp, and adds none")
    _below(card, left, top + 192, *lines)


def _below(card: Card, left: float, bottom: float, *lines: tuple[str, str]) -> None:
    for index, (axis, content) in enumerate(lines):
        y = bottom + 34 + index * 19
        card.text(left, y, axis, size=13, weight=600)
        card.text(left + 24, y, content, size=13, fill="soft")


# Coordinates of every rank ------------------------------------------------------------------------------


def mesh(parallel: ParallelSpec, *, ranks_per_node: int) -> str:
    """Three views of one mesh: a column per rank, a row per axis."""
    shards = parallel.dp_shard * parallel.cp
    views = {
        "activations": {
            "pp": parallel.pp,
            "dp_shard": parallel.dp_shard,
            "cp": parallel.cp,
            "tp": parallel.tp,
        },
        "parameters": {"shard": shards, "tp": parallel.tp},
        "experts": {"expert_shard": shards // parallel.ep, "ep": parallel.ep, "tp": parallel.tp},
    }
    degrees = ", ".join(f"{axis} {degree}" for axis, degree in views["activations"].items())
    card = Card(
        WIDTH,
        432,
        title=f"One world, three views: {degrees}, ep {parallel.ep}",
        subtitle="a column is a rank, a number its coordinate; ranks that differ in one row form a group",
    )
    left, cell = 204.0, 45.4
    _ranks(card, parallel.num_ranks, ranks_per_node, left=left, cell=cell)
    top = 140.0
    for view, degrees in views.items():
        card.text(MARGIN, top + 17, view, weight=600, size=13)
        for row, axis in enumerate(degrees):
            card.text(left - 10, top + row * 27 + 17, axis, anchor="end", size=13, is_code=True)
            coordinates = _coordinates(parallel.num_ranks, list(degrees.values()), row)
            _coordinate_row(card, coordinates, left=left, top=top + row * 27, cell=cell)
        top += len(degrees) * 27 + 14
    return card.svg()


def _coordinates(num_ranks: int, degrees: list[int], row: int) -> list[int]:
    """The coordinate of each rank on the row-th of nested axes, the last one innermost."""
    inner = 1
    for degree in degrees[row + 1 :]:
        inner *= degree
    return [rank // inner % degrees[row] for rank in range(num_ranks)]


def _ranks(card: Card, num_ranks: int, ranks_per_node: int, *, left: float, cell: float) -> None:
    for node in range(num_ranks // ranks_per_node):
        first = left + node * ranks_per_node * cell
        card.bracket(first + 2, first + ranks_per_node * cell - 4, 98, f"node {node}")
    card.text(left - 10, 124, "rank", anchor="end", size=13, fill="soft")
    for rank in range(num_ranks):
        card.text(left + (rank + 0.5) * cell - 1, 124, str(rank), anchor="middle", size=13, fill="soft")


def _coordinate_row(card: Card, coordinates: list[int], *, left: float, top: float, cell: float) -> None:
    at = 0
    for value, run in groupby(coordinates):
        count = len(list(run))
        fill = RANK_COLOURS[value % len(RANK_COLOURS)]
        card.labelled_box(left + at * cell, top, count * cell - 2, 23, fill=fill, label=str(value))
        at += count


# Data parallel ------------------------------------------------------------------------------------------

STATE_BYTES = {"weights": 4, "gradients": 4, "optimizer": 8}
STATE_COLOURS = {"weights": RANK_COLOURS[0], "gradients": RANK_COLOURS[1], "optimizer": RANK_COLOURS[2]}
# The first ZeRO stage that shards each part of the state.
SHARDED_FROM = {"optimizer": 1, "gradients": 2, "weights": 3}
TRAFFIC = ("2 P", "2 P", "(m + 1) P", "3 m P")


def data_parallel(num_ranks: int) -> str:
    """The state of each rank under each ZeRO stage, with bytes to scale."""
    card = Card(
        WIDTH,
        466,
        title=f"What each of {num_ranks} data-parallel ranks stores, AdamW",
        subtitle="height: bytes per parameter; filled: on this rank; P parameters, m micro-batches",
    )
    for stage in range(4):
        left = 88 + stage * 214
        name = "zero 0 (DDP)" if stage == 0 else "zero 3 (FSDP)" if stage == 3 else f"zero {stage}"
        card.text(left, 98, name, weight=600, size=14)
        for rank in range(num_ranks):
            _rank_state(card, stage, rank, num_ranks, left=left + rank * 42, top=114)
        stored = sum(_stored_bytes(part, stage, num_ranks) for part in STATE_BYTES)
        card.text(left, 426, f"{stored:g} bytes per parameter", size=13)
        card.text(left, 445, f"{TRAFFIC[stage]} elements per step", size=13, fill="soft")
    top = 114.0
    for part, size in STATE_BYTES.items():
        card.text(78, top + size * 8 + 4, part, anchor="end", fill="soft")
        top += size * 16 + 5
    return card.svg()


def _stored_bytes(part: str, stage: int, num_ranks: int) -> float:
    return STATE_BYTES[part] / (num_ranks if stage >= SHARDED_FROM[part] else 1)


def _rank_state(card: Card, stage: int, rank: int, num_ranks: int, *, left: float, top: float) -> None:
    y = top
    for part, size in STATE_BYTES.items():
        height = size * 16.0
        card.box(left, y, 36, height, fill="empty", radius=2)
        if stage >= SHARDED_FROM[part]:
            share = height / num_ranks
            card.box(left, y + rank * share, 36, share, fill=STATE_COLOURS[part], radius=2)
        else:
            card.box(left, y, 36, height, fill=STATE_COLOURS[part], radius=2)
        y += height + 5
    card.text(left + 18, y + 12, f"r{rank}", anchor="middle", fill="soft")


# Tensor parallel ----------------------------------------------------------------------------------------


def tensor_parallel() -> str:
    """An MLP on two ranks of tp, from one sequence-parallel shard to the next."""
    card = Card(
        WIDTH,
        440,
        title="Tensor parallel with sequence parallel: an MLP on two ranks",
        subtitle="attention is the same with heads in place of MLP columns; grey: on the other rank",
    )
    headings = (
        (70, "x[B, S_tp, D]"),
        (222, "x[B, S, D]"),
        (358, "W[D, F_tp]"),
        (494, "h[B, S, F_tp]"),
        (630, "W[F_tp, D]"),
        (752, "y{tp}[B, S, D]"),
        (890, "y[B, S_tp, D]"),
    )
    for x, shape in headings:
        card.text(x, 100, shape, anchor="middle", is_code=True, size=12)
    for rank in range(2):
        _tp_lane(card, rank, top=118 + rank * 142)
    for x, name, size in ((146, "all-gather", "B S D"), (822, "reduce-scatter", "B S D")):
        card.line(x, 112, x, 386, stroke="edge", width=2)
        card.text(x, 404, name, anchor="middle", weight=600, size=13)
        card.text(x, 421, f"{size} elements", anchor="middle", fill="soft")
    card.text(494, 404, "no communication", anchor="middle", size=13, weight=600)
    card.text(494, 421, "the activation is elementwise over the columns", anchor="middle", fill="soft")
    return card.svg()


def _tp_lane(card: Card, rank: int, *, top: float) -> None:
    dark, light = RANK_COLOURS[rank], LIGHT_COLOURS[rank]
    middle = top + 55
    card.text(MARGIN - 8, middle + 4, f"r{rank}", size=13, fill="soft")

    def half(x: float) -> None:
        card.box(x, top, 56, 110, fill="empty")
        card.box(x, top + rank * 56, 56, 54, fill=light, edge=dark)

    half(42)
    card.box(194, top, 56, 110, fill=light, edge=dark)
    _matrix(card, 318, middle, is_columns=True, rank=rank)
    card.box(474, top, 40, 110, fill=light, edge=dark)
    _matrix(card, 602, middle, is_columns=False, rank=rank)
    card.box(724, top, 56, 110, fill="page", edge=dark, is_dashed=True)
    card.text(752, middle - 2, "partial", anchor="middle", size=11, fill="soft")
    card.text(752, middle + 12, "sum", anchor="middle", size=11, fill="soft")
    half(862)
    for x1, x2 in ((104, 188), (256, 312), (406, 468), (520, 596), (664, 718), (786, 856)):
        card.arrow(x1, middle, x2, middle)


def _matrix(card: Card, left: float, middle: float, *, is_columns: bool, rank: int) -> None:
    """A weight sharded over two ranks, with the shard of this rank filled."""
    for half in range(2):
        fill = RANK_COLOURS[rank] if half == rank else "empty"
        if is_columns:
            card.box(left + half * 42, middle - 28, 40, 56, fill=fill, radius=2)
        else:
            card.box(left, middle - 41 + half * 42, 56, 40, fill=fill, radius=2)


# Expert parallel ----------------------------------------------------------------------------------------

CHOICES = (
    ((2, "a"), (0, "b"), (1, "c"), (3, "d"), (0, "e"), (2, "f")),
    ((1, "g"), (3, "h"), (3, "i"), (0, "j"), (3, "k"), (1, "l")),
)
"""The tokens of each rank: the expert that a token is routed to, and its name."""
EXPERTS_OF_RANK = ((0, 1), (2, 3))
LANE_TOPS = (142.0, 282.0)
TOKEN = 26.0


def expert_parallel() -> str:
    """Dispatch of the tokens of two ranks to four experts, and combine."""
    card = Card(
        WIDTH,
        400,
        title="Expert parallel: ep 2, four experts, six tokens on each rank",
        subtitle="colour: the expert a token chose; N rows on a rank, top_k for each token (here one)",
    )
    columns = (64.0, 284.0, 508.0, 748.0)
    names = ("routed", "sorted by expert", "on the expert's rank", "original order")
    for x, name in zip(columns, names, strict=True):
        card.text(x + 78, 98, name, anchor="middle", size=13, weight=600)
    for rank, top in enumerate(LANE_TOPS):
        card.text(MARGIN - 4, top + 20, f"r{rank}", size=13, fill="soft")
        _tokens(card, CHOICES[rank], left=columns[0], top=top)
        _tokens(card, tuple(sorted(CHOICES[rank], key=lambda one: one[0])), left=columns[1], top=top)
        _experts(card, rank, left=columns[2], top=top)
        _tokens(card, CHOICES[rank], left=columns[3], top=top)
        card.arrow(columns[0] + 162, top + 13, columns[1] - 6, top + 13)
    for left, right in ((columns[1] + 162, columns[2] - 6), (columns[2] + 166, columns[3] - 8)):
        _all_to_all(card, left, right)
        card.text((left + right) / 2, 366, "all-to-all", anchor="middle", size=13, weight=600)
        card.text((left + right) / 2, 383, "N D elements", anchor="middle", fill="soft")
    return card.svg()


def _tokens(card: Card, tokens: tuple[tuple[int, str], ...], *, left: float, top: float) -> None:
    for index, (expert, name) in enumerate(tokens):
        x = left + index * TOKEN
        card.labelled_box(x, top, TOKEN - 2, TOKEN - 2, fill=RANK_COLOURS[expert], label=name)


def _experts(card: Card, rank: int, *, left: float, top: float) -> None:
    """The tokens of each expert of a rank, from all ranks, inside the expert's frame."""
    for row, expert in enumerate(EXPERTS_OF_RANK[rank]):
        y = top - 30 + row * 50
        card.box(left, y, 160, 44, fill=LIGHT_COLOURS[expert], edge=RANK_COLOURS[expert])
        card.text(left + 8, y + 27, f"expert {expert}", size=11, fill=ON_LIGHT)
        chosen = tuple(one for of_rank in CHOICES for one in of_rank if one[0] == expert)
        _tokens(card, chosen, left=left + 54, top=y + 10)


def _all_to_all(card: Card, left: float, right: float) -> None:
    for source in LANE_TOPS:
        for target in LANE_TOPS:
            start, end = source + 13, target + 13
            card.arrow(left, start + (end - start) * 0.03, right, end - (end - start) * 0.06)


# Pipeline stages ----------------------------------------------------------------------------------------


def stages(name: str, num_stages: int) -> str:
    """The cost of each stage: with an even split of the layers, and with the split of the program."""
    model = family(name)
    head = model.vocab_size * model.width / layer_costs(model)[0]
    even = [model.num_layers // num_stages] * num_stages
    balanced = [len(layers) for layers in stage_layers(model, num_stages)]
    card = Card(
        WIDTH,
        404,
        title=f"Stages of {name} over pp {num_stages}",
        subtitle=f"width: matmul FLOPs; the head equals {head:.1f} layers; the line is the slowest stage",
    )
    _split(card, "even split", even, head, top=92)
    _split(card, "our split", balanced, head, top=246)
    return card.svg()


def _split(card: Card, name: str, layers: list[int], head: float, *, top: float) -> None:
    left, unit = 176.0, 66.0
    slowest = max(max(layers[:-1]), layers[-1] + head)
    card.text(MARGIN, top + 20, name, weight=600, size=13)
    for stage, count in enumerate(layers):
        y = top + stage * 33
        card.text(left - 10, y + 19, f"stage {stage}", anchor="end", fill="soft", size=13)
        card.box(left, y, slowest * unit, 28, fill="empty")
        for layer in range(count):
            card.box(left + layer * unit, y, unit - 2, 28, fill=RANK_COLOURS[0], radius=2)
        if stage == len(layers) - 1:
            card.labelled_box(left + count * unit, y, head * unit, 28, fill=RANK_COLOURS[1], label="head")
    card.line(left + slowest * unit, top - 8, left + slowest * unit, top + len(layers) * 33 + 2, stroke="ink")
    card.text(left + slowest * unit + 6, top + 4, f"{slowest:.1f}", size=13, weight=600)


if __name__ == "__main__":
    main()
