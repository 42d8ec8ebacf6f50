"""Draws the pictures of docs/tutorials: `python docs/draw_tutorials.py`.

Numbers come from the program or from what a page prints. A test compares the committed files with these.
"""

import re
from pathlib import Path

from picture_card import MARGIN, RANK_COLOURS, Card

from meshwright import svg
from meshwright.plan.time.timeline import StageSeconds, simulate
from meshwright.plan.workload.schedules import PipelineShape
from meshwright.spec.families import family
from meshwright.spec.parallel import Schedule
from meshwright.spec.parameters import num_parameters

TUTORIALS = Path(__file__).parent / "tutorials"
WIDTH = 960


def main() -> None:
    """Write every picture."""
    for name, text in pictures().items():
        (TUTORIALS / "pictures" / name).write_text(text)


def pictures() -> dict[str, str]:
    """File name -> text of each picture."""
    return {
        "collectives.svg": collectives(),
        "formats.svg": formats(),
        "memory_format.svg": memory_format(),
        "pipeline.svg": pipeline(num_ranks=2, num_microbatches=4),
        "recompute.svg": recompute(num_blocks=6),
        "zero.svg": zero(num_ranks=8),
        "zeroing.svg": zeroing(),
    }


# Collectives --------------------------------------------------------------------------------------------


def collectives() -> str:
    """Two ranks before and after each collective."""
    card = Card(
        WIDTH, 300, title="Collectives on two ranks", subtitle="a box is a part of a tensor; colour: its rank"
    )
    cases = (
        ("broadcast", (("a", "b"), ("", "")), (("a", "b"), ("a", "b"))),
        ("all-reduce", (("a", "b"), ("c", "d")), (("a+c", "b+d"), ("a+c", "b+d"))),
        ("all-gather", (("a",), ("c",)), (("a", "c"), ("a", "c"))),
        ("reduce-scatter", (("a", "b"), ("c", "d")), (("a+c",), ("b+d",))),
        ("all-to-all", (("a", "b"), ("c", "d")), (("a", "c"), ("b", "d"))),
    )
    for index, (name, before, after) in enumerate(cases):
        left = 84 + index * 174
        card.text(left + 41, 100, name, weight=600, size=14, anchor="middle")
        _parts(card, left, 116, before)
        card.arrow(left + 41, 196, left + 41, 214)
        _parts(card, left, 220, after)
    for top in (116, 220):
        for rank in range(2):
            card.text(MARGIN, top + 22 + rank * 36, f"rank {rank}", fill="soft")
    return card.svg()


def _parts(card: Card, left: float, top: float, rows: tuple[tuple[str, ...], ...]) -> None:
    owners = {"a": 0, "b": 0, "c": 1, "d": 1}
    for rank, row in enumerate(rows):
        start = left + 41 - 21 * len(row)
        for index, label in enumerate(row):
            x, y = start + index * 42, top + rank * 36
            if not label:
                card.box(x, y, 40, 32, fill="empty")
            else:
                colour = RANK_COLOURS[owners[label]] if label in owners else RANK_COLOURS[2]
                card.labelled_box(x, y, 40, 32, fill=colour, label=label)


# Precision ----------------------------------------------------------------------------------------------


def formats() -> str:
    """The bits of each number format."""
    card = Card(WIDTH, 336, title="Bits of number formats", subtitle="exponent: range; mantissa: digits")
    rows = (
        ("fp32", 8, 23),
        ("tf32", 8, 10),
        ("bf16", 8, 7),
        ("fp16", 5, 10),
        ("fp8 E4M3", 4, 3),
        ("fp8 E5M2", 5, 2),
    )
    for index, (name, exponent, mantissa) in enumerate(rows):
        y = 84 + index * 40
        card.text(MARGIN, y + 20, name, weight=600, size=14)
        bits = [RANK_COLOURS[3], *[RANK_COLOURS[1]] * exponent, *[RANK_COLOURS[0]] * mantissa]
        for bit, colour in enumerate(bits):
            card.box(120 + bit * 22, y, 20, 28, fill=colour, radius=2)
        note = f"1 + {exponent} + {mantissa} bits"
        card.text(130 + len(bits) * 22, y + 19, note, fill="soft", size=13)
    entries = (("sign", RANK_COLOURS[3]), ("exponent", RANK_COLOURS[1]), ("mantissa", RANK_COLOURS[0]))
    for index, (name, colour) in enumerate(entries):
        card.box(700 + index * 84, 284, 14, 14, fill=colour, radius=2)
        card.text(720 + index * 84, 296, name, fill="soft", size=13)
    return card.svg()


# Memory format ------------------------------------------------------------------------------------------


def memory_format() -> str:
    """The order of the elements of a 3-channel image of four pixels in memory."""
    card = Card(
        WIDTH, 240, title="One image in memory: 3 channels, 4 pixels", subtitle="c: channel, p: pixel"
    )
    orders = (
        ("contiguous (NCHW)", [(c, p) for c in range(3) for p in range(4)], "a channel after the other"),
        ("channels_last (NHWC)", [(c, p) for p in range(4) for c in range(3)], "a pixel after the other"),
    )
    for index, (title, order, note) in enumerate(orders):
        y = 88 + index * 70
        card.text(MARGIN, y + 18, title, weight=600, size=13)
        card.text(MARGIN, y + 36, note, fill="soft")
        for place, (channel, pixel) in enumerate(order):
            name = f"c{channel} p{pixel}"
            card.labelled_box(220 + place * 58, y, 54, 40, fill=RANK_COLOURS[channel], label=name)
    card.arrow(220, 222, 912, 222)
    card.text(MARGIN, 226, "addresses grow", fill="soft")
    return card.svg()


# Pipeline -----------------------------------------------------------------------------------------------


def pipeline(num_ranks: int, num_microbatches: int) -> str:
    """GPipe and 1F1B as timelines, a backward twice as long as a forward."""
    card = Card(
        WIDTH,
        330,
        title=f"{num_ranks} stages, {num_microbatches} micro-batches",
        subtitle="numbers: micro-batches; a backward takes two forwards",
    )
    shape = PipelineShape(num_ranks, 1, num_microbatches)
    card.text(MARGIN, 130, "GPipe", weight=600, size=14)
    _timeline(card, 96, "gpipe", shape)
    card.text(MARGIN, 240, "1F1B", weight=600, size=14)
    _timeline(card, 206, "1f1b", shape)
    for index, (name, colour) in enumerate((("forward", RANK_COLOURS[0]), ("backward", RANK_COLOURS[1]))):
        card.box(170 + index * 110, 304, 14, 14, fill=colour, radius=2)
        card.text(190 + index * 110, 316, name, fill="soft", size=13)
    return card.svg()


def _timeline(card: Card, top: float, schedule: Schedule, shape: PipelineShape) -> None:
    unit, left = 48.0, 170.0
    seconds = StageSeconds.uniform(shape.num_stages, forward=1, backward_input=1, backward_weight=1)
    timeline = simulate(schedule, shape, seconds)
    for rank, row in enumerate(timeline.ranks):
        y = top + rank * 40
        card.text(left - 10, y + 21, f"rank {rank}", anchor="end", fill="soft", size=13)
        card.box(left, y, float(timeline.finish_seconds) * unit - 2, 32, fill="empty")
        for action, start, end in ((one.action, one.start, one.end) for one in row):
            colour, label = RANK_COLOURS[action.kind != "F"], str(action.microbatch)
            card.labelled_box(left + start * unit, y, (end - start) * unit - 2, 32, fill=colour, label=label)


# Memory -------------------------------------------------------------------------------------------------


def recompute(num_blocks: int) -> str:
    """Bytes of activations over forward and backward, with and without recompute."""
    keeps, inner = 1.0, 5.0  # the input of a block, and the rest of its activations
    plain = [0.0]
    plain += [(keeps + inner) * (block + 1) for block in range(num_blocks)]
    plain += [(keeps + inner) * (num_blocks - block - 1) for block in range(num_blocks)]
    saved: list[svg.Point] = [(0, 0)]
    for block in range(num_blocks):
        saved += [(block + 0.9, keeps * block + keeps + inner), (block + 1, keeps * (block + 1))]
    for block in range(num_blocks):
        left = keeps * (num_blocks - block)
        start = num_blocks + block
        saved += [(start + 0.4, left + inner), (start + 1, left - keeps)]
    card = Card(
        WIDTH,
        340,
        title="Memory of activations over one step",
        subtitle=f"{num_blocks} blocks; forward on the left half, backward on the right half",
    )
    top = (keeps + inner) * num_blocks
    plot = svg.Plot(svg.Scale(0, 2 * num_blocks, 60, 920), svg.Scale(0, top, 290, 90))
    parts = [
        *plot.grid([0, top / 2, top], lambda value: f"{value / top:.0%}"),
        svg.line((490, 84), (490, 290), stroke="edge"),
        plot.line(enumerate(plain), RANK_COLOURS[1]),
        plot.line(saved, RANK_COLOURS[0]),
        *svg.line_legend(
            [svg.Entry("all kept", RANK_COLOURS[1]), svg.Entry("recompute", RANK_COLOURS[0])], 720, 104
        ),
        svg.text(275, 318, "forward", size=13, fill="soft", anchor="middle"),
        svg.text(705, 318, "backward", size=13, fill="soft", anchor="middle"),
    ]
    card.add(parts)
    return card.svg()


def zero(num_ranks: int) -> str:
    """Bytes of state on one rank by stage, for a model of 8B parameters."""
    parameters = num_parameters(family("llama-3.1-8b"))
    card = Card(
        WIDTH,
        300,
        title=f"State of llama-3.1-8b on each of {num_ranks} ranks",
        subtitle="2 bytes of weights, 2 of gradients and 12 of optimizer states per parameter",
    )
    items = (("weights", 2.0, 3), ("gradients", 2.0, 2), ("optimizer", 12.0, 1))
    scale = 720 / (16 * parameters / 2**30)
    for stage in range(4):
        y, x, total = 84 + stage * 42, 110.0, 0.0
        card.text(MARGIN, y + 20, f"stage {stage}", weight=600, size=14)
        for (_, size, first), colour in zip(items, RANK_COLOURS, strict=False):
            gib = size * parameters / 2**30 / (num_ranks if stage >= first else 1)
            card.box(x, y, max(gib * scale - 1, 1), 30, fill=colour, radius=2)
            x, total = x + gib * scale, total + gib
        card.text(x + 8, y + 20, f"{total:.1f} GiB", size=13)
    for index, ((name, _, _), colour) in enumerate(zip(items, RANK_COLOURS, strict=False)):
        card.box(110 + index * 110, 266, 14, 14, fill=colour, radius=2)
        card.text(130 + index * 110, 278, name, fill="soft", size=13)
    return card.svg()


def zeroing() -> str:
    """The losses that gradient_accumulation.md prints."""
    text = (TUTORIALS / "gradient_accumulation.md").read_text()
    lines = re.findall(r"^zeroing (\D+?) +([\d. ]+)$", text, re.MULTILINE)
    card = Card(WIDTH, 340, title="Where gradients are zeroed", subtitle="loss of the full batch by step")
    plot = svg.Plot(svg.Scale(0, 60, 60, 920), svg.Scale(0, 3.5, 290, 90))
    parts = [*plot.grid([0, 1, 2, 3], lambda value: f"{value:g}"), *plot.x_labels(range(0, 61, 10), str)]
    for (_, numbers), colour in zip(lines, RANK_COLOURS, strict=False):
        points = [(10 * index, float(number)) for index, number in enumerate(numbers.split())]
        parts.append(plot.line(points, colour))
    names = [svg.Entry(name, colour) for (name, _), colour in zip(lines, RANK_COLOURS, strict=False)]
    parts += svg.line_legend(names, 700, 150)
    card.add(parts)
    return card.svg()


if __name__ == "__main__":
    main()
