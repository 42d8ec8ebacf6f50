"""Shared fixtures."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import multiprocessing

import pytest
from hypothesis import settings
from tests.support import fault_table

from meshwright.rehearse.rank_pool import RankPool

# A slow machine is no failure.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

PRELOAD = ["pytest", "tests.support.equivalence", "tests.support.run_directories"]


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest):
    """The pool of gloo ranks: `ranks.run(function, world_size, *args)`."""
    pool = RankPool()
    # Ranks are forked from a server, and new ones every few jobs: what the server imports, no rank imports.
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([*PRELOAD, *_imported_by_ranks(request.session)])
    yield pool
    pool.close()


def _imported_by_ranks(session: pytest.Session) -> list[str]:
    """The slow imports that the test modules of this session name in `RANKS_IMPORT`."""
    modules = {getattr(item, "module", None) for item in session.items}
    return sorted({name for module in modules for name in getattr(module, "RANKS_IMPORT", ())})


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep the trials of faults at once, where a file is named for them."""
    fault_table.append_to_file(fault_table.recorded([report]))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The table of faults, where this session made some."""
    reports = [report for found in terminalreporter.stats.values() for report in found]
    trials = fault_table.recorded(reports)
    if trials:
        terminalreporter.section("faults")
        terminalreporter.write_line(fault_table.table(trials))
