"""Metrics as columns: the same numbers as row by row, whatever the file holds."""

import json
import math
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.support.soak import examples

from meshwright.observe.history import read_history
from meshwright.observe.metrics import read_metrics

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**60), 2**60),
    st.floats(),
    st.sampled_from(["NaN", "-Infinity", "x"]),
)
ROWS = st.lists(st.fixed_dictionaries({"step": st.integers(-1, 9)}, optional={"loss": VALUES, "mfu": VALUES}))


@examples(50)
@given(ROWS)
def test_columns_equal_rows(tmp_path_factory, rows: list[dict]) -> None:
    path = tmp_path_factory.mktemp("history") / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    history = read_history(path, ("loss", "mfu"))
    expected = read_metrics(path)
    assert history.steps.tolist() == [row["step"] for row in expected]
    for name in ("loss", "mfu"):
        points = [(row["step"], float(value)) for row in expected if (value := row.get(name)) is not None]
        found = [tuple(point) for point in history.points(name).tolist()]
        assert np.array_equal(np.array(found), np.array(points), equal_nan=True)


def test_damaged_and_incomplete_lines_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        b'{"step": 2, "loss": 1.0}\n{"st\n\xff\xfe\n{"step": 1, "loss": "NaN"}\n{"step": 3, "loss": 4}'
    )
    history = read_history(tmp_path, ("loss",))
    assert history.steps.tolist() == [1, 2]
    assert math.isnan(history.values("loss")[0])
    assert len(read_history(tmp_path / "nothing", ("loss",))) == 0


def test_the_last_line_of_a_step_counts(tmp_path: Path) -> None:
    lines = [{"step": 2, "loss": 5.0}, {"step": 1, "loss": 7.0}, {"step": 2, "loss": 6.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_history(tmp_path, ("loss",)).points("loss").tolist() == [[1, 7], [2, 6]]
    assert read_history(tmp_path, ("loss",)).up_to(1).points("loss").tolist() == [[1, 7]]
