"""Each planted bug turns the test that is named for it red."""

import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import pytest
from tests.planted.bugs import BUGS
from tests.planted.plant import Bug, new_names, outcomes, plant
from tests.planted.trial_server import TrialServer

NUM_SERVERS = 2


@pytest.fixture(scope="module")
def servers() -> Iterator[SimpleQueue[TrialServer]]:
    """Trial servers that are free."""
    started = [TrialServer() for _ in range(NUM_SERVERS)]
    free: SimpleQueue[TrialServer] = SimpleQueue()
    for server in started:
        free.put(server)
    yield free
    for server in started:
        server.close()


@pytest.fixture(scope="module")
def verdicts(
    request: pytest.FixtureRequest, servers: SimpleQueue[TrialServer]
) -> Iterator[dict[str, Future[dict[str, bool]]]]:
    """Bug -> outcome of its test. All trials of the session are queued at once."""
    tried = [item for item in request.session.items if item.originalname == "test_turns_its_test_red"]
    wanted = {item.callspec.params["bug"].name for item in tried}
    with ThreadPoolExecutor(NUM_SERVERS) as workers:
        yield {bug.name: workers.submit(_try, servers, bug) for bug in BUGS if bug.name in wanted}


def _try(servers: SimpleQueue[TrialServer], bug: Bug) -> dict[str, bool]:
    server = servers.get()
    try:
        with tempfile.TemporaryDirectory(prefix="meshwright-planted-") as folder:
            return outcomes(server, plant(bug, Path(folder)), [bug.test], includes_soak=bug.is_wide)
    finally:
        servers.put(server)


@pytest.mark.parametrize(
    "bug",
    [pytest.param(bug, marks=pytest.mark.soak if bug.is_wide else ()) for bug in BUGS],
    ids=lambda bug: bug.name.replace(" ", "_"),
)
def test_turns_its_test_red(verdicts, bug):
    assert verdicts[bug.name].result() == {bug.test: False}


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name.replace(" ", "_"))
def test_fits_the_source(bug):
    """Of every bug, also of those that only `make soak` tries: a stale text would prove nothing."""
    assert new_names(bug) == set()


def test_an_unchanged_copy_is_green(servers, tmp_path):
    """A red test is due to the bug, not to running in a copy: unchanged, the tests of every file pass."""
    unchanged = Bug("nothing", "errors.py", "EXIT_DONE = 0", "EXIT_DONE = 0", "")
    tests = sorted({bug.test for bug in BUGS if "test_any_split_under_sharding" in bug.test})
    server = servers.get()
    try:
        assert outcomes(server, plant(unchanged, tmp_path), tests) == dict.fromkeys(tests, True)
    finally:
        servers.put(server)


def test_a_text_that_is_missing_is_reported(tmp_path):
    missing = Bug("missing", "errors.py", "no such text", "", "")
    with pytest.raises(AssertionError, match="holds the text 0 times"):
        plant(missing, tmp_path)
