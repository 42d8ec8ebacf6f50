"""The report is one small, self-contained file with the numbers of the plan."""

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from tests.support.plans import planned

from meshwright.plan.draw.charts import Axis, Bar, Line, line_chart, stacked_bars
from meshwright.plan.draw.memory import memory_chart, memory_table
from meshwright.plan.draw.plan_report import report_html
from meshwright.plan.explain.neighbours import neighbours
from meshwright.plan.explain.reasons import explain
from meshwright.plan.search.candidate import candidate_of
from meshwright.plan.search.sizing import scaling_counts, strong_scaling


@pytest.fixture(scope="module")
def html() -> str:
    plan = planned("llama-3.2-1b", "dgx-h100:2", "pp=2", seq=2048, batch_tokens=2**19)
    return report_html(plan, tokens=10**11, why=explain(plan), neighbours=neighbours(plan), price=2.5)


def test_nothing_is_fetched_and_nothing_is_run(html: str) -> None:
    outside = re.findall(r"https?://[^\"' ]+", html)
    assert set(outside) <= {"http://www.w3.org/2000/svg"}
    assert "<script" not in html
    assert len(html.encode()) < 300_000


def test_every_part_is_there(html: str) -> None:
    for part in (
        "Memory per device",
        "Where a step goes",
        "The pipeline",
        "More or fewer devices",
        "Time and cost",
    ):
        assert f"<h2>{part}</h2>" in html
    assert "at 2.5 per device-hour" in html
    assert html.count("<svg") == 4


def test_tags_are_balanced(html: str) -> None:
    class Balance(HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.open_tags: list[str] = []

        def handle_starttag(self, tag: str, attrs: object) -> None:
            if tag not in ("meta", "br"):
                self.open_tags.append(tag)

        def handle_startendtag(self, tag: str, attrs: object) -> None:
            pass

        def handle_endtag(self, tag: str) -> None:
            assert self.open_tags.pop() == tag

    balance = Balance()
    balance.feed(html)
    assert balance.open_tags == []


def test_bars_are_drawn_to_scale() -> None:
    svg = ElementTree.fromstring(stacked_bars([Bar("a", {"x": 1.0, "y": 3.0}, "4")], full=4.0).inline())
    widths = [float(box.get("width", 0)) for box in svg.iter("rect") if box.get("height") == "30"]
    assert widths[1] == pytest.approx(3 * widths[0], rel=0.01)


def test_line_chart_has_a_point_for_every_value() -> None:
    lines = [Line("a", [(1, 10), (2, 19), (4, 35)], "#000000", has_dots=True)]
    chart = line_chart(lines, x=Axis("x", str, is_log=True), y=Axis("y", str))
    assert len(list(ElementTree.fromstring(chart.inline()).iter("circle"))) == 3


def test_strong_scaling_includes_the_plan_itself() -> None:
    plan = planned("llama-3.2-1b", "dgx-h100:2", "pp=2", seq=2048, batch_tokens=2**19)
    counts = scaling_counts(plan)
    assert plan.best.num_ranks in counts
    seconds = {point.num_devices: point.step_seconds for point in strong_scaling(plan, counts)}
    assert seconds[plan.best.num_ranks] == pytest.approx(plan.result.fitting.step_seconds.min())


def test_memory_of_a_run_file_is_drawn() -> None:
    best = planned("llama-3.2-1b", "dgx-h100:2", "pp=2", seq=2048, batch_tokens=2**19).best
    same = candidate_of(best.run, best.question.cluster)
    assert same.device_bytes == best.device_bytes
    assert same.step_seconds == pytest.approx(best.step_seconds)
    assert [column.header for column in memory_table(same).columns][1:4] == [
        "first stage",
        "middle stage",
        "last stage",
    ]
    ElementTree.fromstring(memory_chart(same).document())
