"""Peak allocated bytes of several runs by tracing, for `plan --verify`.

Only what the peak needs is traced: no deep trace for fragmentation. All layouts share one pool of processes.
A layout that was traced before on this machine is read from `rehearse/peak_cache.py`.
"""

from collections.abc import Callable, Sequence

from meshwright.rehearse.parallel_traces import run_all
from meshwright.rehearse.peak_cache import TracedPeak, peak_key, read_peaks, store_peaks
from meshwright.rehearse.rank_report import allocated_of, peak_tasks, ranks_to_rehearse
from meshwright.spec import RunSpec

Log = Callable[[str], None]


def traced_peaks(runs: Sequence[RunSpec], *, log: Log = lambda _: None) -> list[TracedPeak]:
    """The highest peak among the first, a middle and the last pipeline rank of every run, uncompiled."""
    runs = [run.with_(compile=False) for run in runs]
    keys, known = [peak_key(run) for run in runs], read_peaks()
    new = {key: run for key, run in zip(keys, runs, strict=True) if key not in known}
    if len(new) < len(runs):
        log(f"{len(runs) - len(new)} of {len(runs)} layouts were traced before")
    if new:
        traced = dict(zip(new, _traced(list(new.values()), log), strict=True))
        store_peaks(traced)
        known |= traced
    return [known[key] for key in keys]


def _traced(runs: Sequence[RunSpec], log: Log) -> list[TracedPeak]:
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
