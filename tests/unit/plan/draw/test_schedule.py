"""Pictures of a schedule show its timeline."""

from xml.etree import ElementTree

import pytest

from meshwright.plan.draw.schedule import Costs, draw_svg, draw_text, picture
from meshwright.plan.workload.schedules import SCHEDULES, PipelineShape
from meshwright.spec.parallel import Schedule

ONE_STAGE_1F1B = """\
1f1b: 2 ranks, 2 micro-batches
bubble 50.0% of the compute time (33.3% of all time idle); activations of at most 2 micro-batches per rank
peak activations by rank, in micro-batches: 2, 1

rank 0  F0 F1 ·  ·  B0    ·  B1    \n\
rank 1  ·  F0 B0    F1 B1    ·  ·  \n\

F forward  B backward  · idle
"""


def test_small_schedules_are_written_out() -> None:
    assert draw_text(picture("1f1b", PipelineShape(2, 1, 2))).plain == ONE_STAGE_1F1B


def test_wide_schedules_wrap_and_show_beginning_and_end() -> None:
    text = draw_text(picture("1f1b", PipelineShape(4, 1, 64)), width=60).plain
    assert "time 0 to" in text
    assert "of 201" in text
    assert max(map(len, text.splitlines()[3:])) <= 60


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_svg_has_a_box_for_every_action_and_names_no_other_file(schedule: Schedule) -> None:
    drawn = picture(schedule, PipelineShape(4, 1 if schedule in ("gpipe", "1f1b") else 2, 8))
    svg = draw_svg(drawn)
    root = ElementTree.fromstring(svg)
    titles = [element for element in root.iter() if element.tag.endswith("title")]
    assert len(titles) == sum(len(rank) for rank in drawn.timeline.ranks)
    assert svg.count("http") == 1, "only the name of the SVG namespace"


def test_many_stages_keep_apart_in_colour() -> None:
    svg = draw_svg(picture("interleaved_1f1b", PipelineShape(2, 4, 4)))
    assert all(shade in svg for shade in ("#8db8e8", "#5a8fd0", "#3a6bab", "#264b80"))


def test_unequal_stages_keep_their_proportions() -> None:
    slow_last = Costs(forward=(1.0, 1.5), backward=(2.0, 3.0), weight=(1.0, 1.5))
    drawn = picture("1f1b", PipelineShape(2, 1, 2), slow_last)
    assert drawn.unit == 0.5
    assert drawn.timeline.busy_seconds == (6.0, 9.0)
    assert drawn.timeline.finish_seconds == 12.0  # the slow stage, its first input and its last gradient
    rows = [line for line in draw_text(drawn).plain.splitlines() if line.startswith("rank")]
    assert [row.count("·") for row in rows] == [12, 6]


def test_a_message_delays_its_receiver() -> None:
    shape = PipelineShape(2, 1, 2)
    assert picture("1f1b", shape).timeline.finish_seconds == 9.0
    assert picture("1f1b", shape, Costs(hop=0.25)).timeline.finish_seconds == 9.5  # there and back
