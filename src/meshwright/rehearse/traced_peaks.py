"""Peak allocated bytes of several runs by tracing, for `plan --verify`.

Only what the peak needs is traced: no deep trace for fragmentation. All layouts share one pool of processes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshwright.rehearse.parallel_traces import run_all
from meshwright.rehearse.rank_report import allocated_of, peak_tasks, ranks_to_rehearse
from meshwright.spec import RunSpec

Log = Callable[[str], None]


@dataclass(frozen=True)
class TracedPeak:
    """The rank of a run that allocates most."""

    rank: int
    allocated_bytes: float
    host_bytes: float


def traced_peaks(runs: Sequence[RunSpec], *, log: Log = lambda _: None) -> list[TracedPeak]:
    """The highest peak among the first, a middle and the last pipeline rank of every run, uncompiled."""
    runs = [run.with_(compile=False) for run in runs]
    tasks = {
        (index, rank): peak_tasks(run, rank)
        for index, run in enumerate(runs)
        for rank in ranks_to_rehearse(run.parallel)
    }
    done = run_all([task for some in tasks.values() for task in some], log)
    peaks: dict[int, list[TracedPeak]] = {}
    for (index, rank), some in tasks.items():
        found = allocated_of(runs[index], rank, {task.truncation: done[task] for task in some})
        peaks.setdefault(index, []).append(TracedPeak(rank, found.allocated_bytes, found.host_bytes))
    return [max(peaks[index], key=lambda peak: peak.allocated_bytes) for index in range(len(runs))]
