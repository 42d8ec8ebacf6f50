"""Shared fixtures."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import gc
import multiprocessing
import sys

import pytest
from hypothesis import settings
from tests.support import fault_table

from meshwright.rehearse.rank_pool import RankPool

# A slow machine is no failure. `make test` tries the same examples each time, so only a change turns it red.
# `make soak` chooses its profile on the command line, and looks for new examples.
settings.register_profile("ci", deadline=None, derandomize=True)
settings.register_profile("soak", deadline=None, max_examples=1000)
settings.load_profile("ci")


class Freezer:
    """Freezes all objects, and knows without counting them whether they still are."""

    def __init__(self) -> None:
        self._is_frozen = False
        self._unfreeze = gc.unfreeze
        gc.unfreeze = self._watched_unfreeze

    def freeze(self) -> None:
        """Modules and collected tests live to the end, so garbage collections need not walk them."""
        if not self._is_frozen:
            gc.freeze()
            self._is_frozen = True

    def _watched_unfreeze(self) -> None:
        self._is_frozen = False
        self._unfreeze()


freezer = Freezer()


def pytest_collection_finish() -> None:
    gc.collect()
    freezer.freeze()


def pytest_runtest_setup() -> None:
    """Freeze them again: a run that trains in this process unfreezes everything at its end.

    `gc.get_freeze_count` would tell, but it walks all of them, which takes a tenth of a second.
    """
    freezer.freeze()
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)  # or each process would draw other numbers, and each order of tests


def pytest_sessionfinish() -> None:
    """Let the interpreter free what it froze: some bindings report what is left at exit as leaks."""
    gc.unfreeze()


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
