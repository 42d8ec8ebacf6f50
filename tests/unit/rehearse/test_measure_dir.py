"""What `rehearse --measure --dir` writes, as `plan --calibrate` reads it."""

from pathlib import Path

import pytest

from meshwright.errors import MeshError
from meshwright.observe.history import read_history
from meshwright.rehearse.measure import Measured, write_measured
from meshwright.spec.text import load_run, read_run

MEASURED = Measured(0, "cpu", 10, 20, 0.5, 0.5, is_expandable=False, seconds=(2.0, 0.5, 0.6))


def test_a_measured_run_of_one_rank_is_a_run_directory(tmp_path: Path) -> None:
    run = read_run("demo", ["parallel.dp_replicate=1"]).run
    write_measured(run, [MEASURED], tmp_path / "new")
    assert load_run(tmp_path / "new/run.yaml") == run
    assert read_history(tmp_path / "new", ("step_seconds",)).values("step_seconds").tolist() == [
        2.0,
        0.5,
        0.6,
    ]


def test_one_rank_of_several_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MeshError, match="does not communicate"):
        write_measured(read_run("demo").run, [MEASURED], tmp_path)
