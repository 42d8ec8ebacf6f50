"""Down-sampling keeps every spike and dip, and columns follow what a resumed run rewrites."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.support.soak import examples

from meshwright.observe.watch.columns import Columns, down_sample


def columns_of(*rows: dict) -> Columns:
    columns = Columns(("loss", "eval_loss"))
    columns.append(rows)
    return columns


@examples(50)
@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=300), st.integers(2, 40))
def test_no_extreme_is_lost(values: list[float], num_buckets: int):
    found = np.array(values, np.float32)
    curve = down_sample(np.arange(1, len(values) + 1), found, num_buckets)
    assert len(curve.steps) <= num_buckets and curve.steps == sorted(curve.steps)
    assert np.isclose(min(curve.low), found.min(), rtol=1e-5)
    assert np.isclose(max(curve.high), found.max(), rtol=1e-5)
    assert all(low <= mean + 1e-4 * abs(mean) + 1e-6 for low, mean in zip(curve.low, curve.mean, strict=True))


def test_short_columns_stay_as_they_are():
    curve = down_sample(np.array([1, 2, 3]), np.array([5.0, 4.0, 3.0], np.float32), 100)
    assert (curve.steps, curve.mean, curve.low) == ([1, 2, 3], [5.0, 4.0, 3.0], [5.0, 4.0, 3.0])


def test_values_that_are_not_finite_are_marked():
    columns = columns_of(
        {"step": 1, "loss": 2.0}, {"step": 2, "loss": "NaN"}, {"step": 3, "loss": "Infinity"}
    )
    curve = down_sample(columns.steps, columns.values("loss"), 10)
    assert curve.mean == [2.0, None, None] and curve.broken == [2, 3]
    assert columns.last("loss") == 2.0


def test_rows_without_a_value_are_left_out():
    columns = columns_of({"step": 1, "loss": 2.0}, {"step": 2, "loss": None, "eval_loss": 1.5}, {"step": 3})
    assert down_sample(columns.steps, columns.values("loss"), 10).steps == [1]
    assert down_sample(columns.steps, columns.values("eval_loss"), 10).steps == [2]


def test_a_resumed_run_replaces_what_it_trains_again():
    columns = columns_of(*({"step": step, "loss": 1.0} for step in range(1, 6)))
    columns.append([{"step": 3, "loss": 9.0}, {"step": 4, "loss": 8.0}])
    assert columns.steps.tolist() == [1, 2, 3, 4]
    assert columns.values("loss").tolist() == [1.0, 1.0, 9.0, 8.0]


def test_columns_grow_beyond_their_first_size():
    columns = Columns(("loss",))
    for start in range(0, 5000, 100):
        columns.append([{"step": step + 1, "loss": float(step)} for step in range(start, start + 100)])
    assert len(columns) == 5000 and columns.values("loss")[-1] == 4999.0
