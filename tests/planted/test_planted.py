"""Each planted mistake turns the test that is named for it red."""

import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.planted.bugs import BUGS
from tests.planted.plant import Bug, outcomes, plant

# Each subprocess is mostly start-up on one core.
NUM_AT_ONCE = 2


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[dict[str, bool]]]]:
    """Started together, asked for one by one."""
    marked = [getattr(item, "callspec", None) for item in request.session.items]
    wanted = {spec.params["bug"].name for spec in marked if spec and "bug" in spec.params}
    with ThreadPoolExecutor(NUM_AT_ONCE) as workers:
        yield {bug.name: workers.submit(_try, bug) for bug in BUGS if bug.name in wanted}


def _try(bug: Bug) -> dict[str, bool]:
    with tempfile.TemporaryDirectory(prefix="meshwright-planted-") as folder:
        return outcomes(plant(bug, Path(folder)), [bug.test])


@pytest.mark.parametrize(
    "bug",
    [pytest.param(bug, marks=pytest.mark.soak if bug.is_wide else ()) for bug in BUGS],
    ids=lambda bug: bug.name.replace(" ", "_"),
)
def test_turns_its_test_red(verdicts, bug):
    assert verdicts[bug.name].result() == {bug.test: False}


def test_an_unchanged_copy_is_green(tmp_path):
    """So red comes from the mistake, not from running elsewhere."""
    nothing = Bug("nothing", "errors.py", "EXIT_DONE = 0", "EXIT_DONE = 0", "")
    tests = sorted({bug.test for bug in BUGS if "test_any_cut_under_sharding" in bug.test})
    assert outcomes(plant(nothing, tmp_path), tests) == dict.fromkeys(tests, True)


def test_a_text_that_is_not_there_is_told(tmp_path):
    missing = Bug("missing", "errors.py", "no such text", "", "")
    with pytest.raises(AssertionError, match="holds the text 0 times"):
        plant(missing, tmp_path)
