"""The run that nothing happens to, and the record of what was done to others."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support import fault_table
from tests.support.fault_table import Trial
from tests.support.faults import RUN, finish
from tests.support.live_runs import start


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of `RUN` without any fault: what every run with faults must equal."""
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    with start(RUN, run_dir) as launcher:
        finish(launcher)
    return run_dir


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Callable[[Trial], None]:
    """Adds a trial to the table at the end of the session."""
    return lambda trial: fault_table.record(request.node, trial)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that make trials are marked, so that `make soak` runs those of `make test` too."""
    for item in items:
        if "record" in getattr(item, "fixturenames", ()):
            item.add_marker("fault")
