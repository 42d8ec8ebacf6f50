"""A rank that becomes slow during a run is named."""

import os

from tests.support.faults import GIL_SIGNAL, events
from tests.support.live_runs import LONGEST_SECONDS, SMALL, ranks_of, start, wait_for

# From the signal on, the rank sleeps half of the time, in the middle of whatever it does.
_SITE = f"""
import signal, time
signal.signal(signal.SIGVTALRM, lambda *_: time.sleep(0.05))
signal.signal({int(GIL_SIGNAL)}, lambda *_: signal.setitimer(signal.ITIMER_VIRTUAL, 0.005, 0.005))
"""
RUN = (*SMALL, "schedule.num_steps=100000", "checkpoint.every_steps=100000", "data.batch_sequences=8")


def test_a_rank_that_becomes_slow_is_reported_with_its_host_and_ratio(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(_SITE)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    run_dir = tmp_path / "run"
    with start(RUN, run_dir, env=environment) as launcher:
        try:
            wait_for(lambda: (run_dir / "ranks.jsonl").exists(), launcher)
            ranks_of(launcher)[1].send_signal(GIL_SIGNAL)
            wait_for(lambda: _slow(run_dir, rank=1), launcher)
        finally:
            launcher.terminate()
            launcher.communicate(timeout=LONGEST_SECONDS)
    found = _slow(run_dir, rank=1)[0]
    assert found["ratio"] >= 1.5 and found["slow_host"] in found["text"] and "likely cause" in found["text"]


def _slow(run_dir, *, rank: int) -> list[dict]:
    return [event for event in events(run_dir, "straggler") if event["slow_rank"] == rank]
