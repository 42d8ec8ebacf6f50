"""The traces of several ranks, side by side where they are long and there are cores for it.

Each trace is one process's work on one core, and a rank of a deep run takes several of them.
"""

import os
import signal
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import active_children, get_context
from typing import Any

from meshwright.hardware.machine import usable_cores
from meshwright.rehearse.rank_report import RankReport, Task, Traced, report_of, run_task, trace_tasks
from meshwright.rehearse.trace import Trace
from meshwright.spec import RunSpec

# Blocks times micro-batches, at about ten a second, below which starting processes is not worth it.
WORTH_PROCESSES = 200

Tell = Callable[[str], None]


def rehearse_ranks(
    run: RunSpec, ranks: Iterable[int], *, tell: Tell = lambda _: None, is_full: bool = False, **how: Any
) -> list[RankReport]:
    """As `rehearse_rank`, for each rank; `tell` hears of every trace that is there."""
    tasks = {rank: trace_tasks(run, rank, is_full=is_full, **how) for rank in ranks}
    done = _all_done([task for some in tasks.values() for task in some], tell)
    traced: dict[int, Traced] = {
        rank: {task.cut: done[task] for task in some} for rank, some in tasks.items()
    }
    return [report_of(run, rank, traced[rank], is_full=is_full) for rank in traced]


def _all_done(tasks: list[Task], tell: Tell) -> dict[Task, tuple[Trace, str]]:
    num_processes = min(usable_cores(), len(tasks))
    if num_processes > 1 and sum(task.work for task in tasks) >= WORTH_PROCESSES:
        return _done_in_processes(tasks, num_processes, tell)
    found = {}
    for number, task in enumerate(tasks, start=1):
        tell(f"trace {number} of {len(tasks)}, rank {task.rank}")
        found[task] = run_task(task)
    return found


def _done_in_processes(tasks: list[Task], count: int, tell: Tell) -> dict[Task, tuple[Trace, str]]:
    """The longest first, so that none of them is left over for the end."""
    found: dict[Task, tuple[Trace, str]] = {}
    tell(f"{len(tasks)} traces in {count} processes")
    with ProcessPoolExecutor(count, mp_context=get_context("spawn"), initializer=_be_a_worker) as pool:
        futures = {pool.submit(run_task, task): task for task in sorted(tasks, key=lambda one: -one.work)}
        try:
            for future in as_completed(futures):
                found[futures[future]] = future.result()
                tell(f"trace {len(found)} of {len(tasks)}")
        except BaseException as error:  # nobody waits for what is still being traced
            if isinstance(error, KeyboardInterrupt):
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # this process is about to end: once is enough
            pool.shutdown(wait=False, cancel_futures=True)
            for child in active_children():
                child.terminate()
            raise
    return found


def _be_a_worker() -> None:
    """One thread; an interrupt is the parent's to tell."""
    os.environ["OMP_NUM_THREADS"] = "1"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
