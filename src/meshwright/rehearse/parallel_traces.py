"""The traces of several ranks, in parallel processes where they are long and there are several cores.

A trace keeps one core busy, and a rank of a deep run takes several traces.
"""

import os
import signal
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import active_children, get_context
from typing import Any

from meshwright.hardware.machine import usable_cores
from meshwright.rehearse.rank_report import RankReport, Traced, TraceTask, report_of, run_task, trace_tasks
from meshwright.rehearse.trace import Trace
from meshwright.spec import RunSpec

# Blocks times micro-batches (about ten are traced per second) below which starting processes costs more.
MIN_WORK_FOR_PROCESSES = 200

Log = Callable[[str], None]


def rehearse_ranks(
    run: RunSpec, ranks: Iterable[int], *, log: Log = lambda _: None, extrapolate: bool = True, **how: Any
) -> list[RankReport]:
    """The reports of `rehearse_rank` for several ranks; `log` gets a line for each trace."""
    tasks = {rank: trace_tasks(run, rank, extrapolate=extrapolate, **how) for rank in ranks}
    done = run_all([task for some in tasks.values() for task in some], log)
    traced: dict[int, Traced] = {
        rank: {task.truncation: done[task] for task in some} for rank, some in tasks.items()
    }
    return [report_of(run, rank, traced[rank], extrapolate=extrapolate) for rank in traced]


def run_all(tasks: list[TraceTask], log: Log) -> dict[TraceTask, tuple[Trace, str]]:
    """The trace of every task, in processes where they are worth starting."""
    num_processes = min(usable_cores(), len(tasks))
    if num_processes > 1 and sum(task.work for task in tasks) >= MIN_WORK_FOR_PROCESSES:
        return _run_in_processes(tasks, num_processes, log)
    found = {}
    for number, task in enumerate(tasks, start=1):
        log(f"trace {number} of {len(tasks)}, rank {task.rank}")
        found[task] = run_task(task)
    return found


def _run_in_processes(tasks: list[TraceTask], count: int, log: Log) -> dict[TraceTask, tuple[Trace, str]]:
    """Run the tasks in a process pool, the longest first."""
    found: dict[TraceTask, tuple[Trace, str]] = {}
    log(f"{len(tasks)} traces in {count} processes")
    others = {child.pid for child in active_children()}  # such as ranks of a pool: they are not ours to end
    with ProcessPoolExecutor(count, mp_context=get_context("spawn"), initializer=init_worker) as pool:
        futures = {pool.submit(run_task, task): task for task in sorted(tasks, key=lambda one: -one.work)}
        try:
            for future in as_completed(futures):
                found[futures[future]] = future.result()
                log(f"trace {len(found)} of {len(tasks)}")
        except BaseException as error:  # the remaining traces are of no use
            if isinstance(error, KeyboardInterrupt):
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second interrupt would print a traceback
            pool.shutdown(wait=False, cancel_futures=True)
            for child in active_children():
                if child.pid not in others:
                    child.terminate()
            raise
    return found


def init_worker() -> None:
    """Use one thread, and leave an interrupt to the parent."""
    os.environ["OMP_NUM_THREADS"] = "1"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
