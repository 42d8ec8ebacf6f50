"""Chart geometry: nothing lost that a reader must see, nothing that breaks the page."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.observe.chart import MAX_POINTS, Chart, Series, as_points, draw, smooth, thin


def test_thinning_keeps_ends_spikes_and_dips() -> None:
    points = [(float(step), 1.0) for step in range(10_000)]
    points[4321], points[8765] = (4321.0, 50.0), (8765.0, -50.0)
    kept = thin(points)
    assert len(kept) <= MAX_POINTS + 2
    assert {points[0], points[4321], points[8765], points[-1]} <= set(kept)
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)


def test_thinning_keeps_breaks() -> None:
    points = [(float(step), math.nan if 500 <= step < 520 else 1.0) for step in range(5000)]
    kept = thin(points)
    assert any(not math.isfinite(y) for x, y in kept if 490 <= x <= 530)


def test_short_series_is_left_alone() -> None:
    points = [(1.0, 2.0), (2.0, 3.0)]
    assert thin(points) == points


def test_smoothing_ignores_one_spike_and_keeps_the_ends() -> None:
    points = [(float(step), 1000.0 if step == 50 else float(step)) for step in range(101)]
    smoothed = dict(smooth(points, window=9).tolist())
    assert smoothed[0.0] == 0.0
    assert smoothed[100.0] == 100.0
    assert smoothed[50.0] == pytest.approx(50.0, abs=1)  # half a step of a window of nine whole numbers
    assert len(smooth([(1.0, math.nan)], window=9)) == 0


def test_outlier_is_named_instead_of_flattening_the_rest() -> None:
    points = [(float(step), 1e6 if step == 70 else 1.0 + step / 100) for step in range(1, 101)]
    drawing = draw(Chart(title="Loss", series=[Series("train", as_points(points))], unit=" s"))
    assert drawing is not None
    assert drawing.high < 4
    assert "Off the scale: 1M s at step 70." in drawing.note


def test_non_finite_values_break_the_line_and_are_marked() -> None:
    points = [(1.0, 3.0), (2.0, math.nan), (3.0, 2.0), (4.0, math.inf), (5.0, 1.0)]
    drawing = draw(Chart(title="Loss", series=[Series("train", as_points(points))]))
    assert drawing is not None
    (line,) = drawing.lines
    assert line.path.count("M") == 3
    assert [tick.label for tick in drawing.rim] == ["2", "4"]
    assert line.steps == [1.0, 3.0, 5.0]


def test_chart_without_points_is_not_drawn() -> None:
    assert draw(Chart(title="Loss", series=[])) is None
    assert draw(Chart(title="Loss", series=[Series("train", as_points([]))])) is None


@given(st.lists(st.floats(width=64), min_size=1, max_size=50), st.booleans())
def test_any_values_give_finite_geometry(values: list[float], from_zero: bool) -> None:
    points = [(float(step), y) for step, y in enumerate(values, start=1)]
    drawing = draw(Chart(title="any", series=[Series("y", as_points(points))], from_zero=from_zero))
    assert drawing is not None
    assert "nan" not in drawing.lines[0].path
    assert "inf" not in drawing.lines[0].path
    assert all(-1 <= tick.percent <= 101 for tick in drawing.y_ticks + drawing.x_ticks)
    assert len(drawing.y_ticks) <= 12
