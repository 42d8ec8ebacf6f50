"""The process that starts the ranks, watches them, and starts them again after a failure.

`resilience/supervisor.py` decides; this file starts processes, waits, prints and writes events. It imports no
torch.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from meshwright.errors import EXIT_DONE, EXIT_INTERRUPTED
from meshwright.launch.attempt import AttemptEnd
from meshwright.launch.launched_node import LaunchedNode, launched_node
from meshwright.launch.local import run_attempt
from meshwright.launch.node_ends import NodeEnds
from meshwright.launch.rank_process import Program, can_fork
from meshwright.launch.watch import Watched
from meshwright.observe.events import EventWriter
from meshwright.observe.metrics import last_step
from meshwright.resilience.supervisor import End, History, Restart, decide
from meshwright.spec import RunSpec
from meshwright.train.oom_restart import microbatch_overrides, smaller_microbatch


def run_ranks(
    run: RunSpec, arguments: Sequence[str], run_dir: Path, *, program: Program | None = None
) -> int:
    """Start the ranks of `meshwright <arguments>` on this machine until the run ends; returns the exit code.

    Where a platform has started one process per node, these are the ranks of this node, and the ranks of all
    nodes join. After a crash, a kill or a hang all ranks are started again and resume from the newest
    checkpoint in `run_dir`, or start from step 0 where there is none; after an OOM with the next smaller
    micro-batch, where the run allows it. With `program`, ranks are forked from this process, which has
    imported what they need.
    """
    node, overrides = launched_node(), list[str]()
    policy, ends = run.resilience.restart, NodeEnds(run_dir, node.node) if node else None
    if ends is not None:
        ends.begin()
    history = History(published_step=published_step(run_dir))
    while True:
        ended = run_attempt(
            [*arguments, *overrides],
            num_ranks=node.num_local_ranks(run.parallel.num_ranks) if node else run.parallel.num_ranks,
            watched=Watched(run_dir, run.resilience, is_adaptive=not run.compile),
            node=node,
            program=program if can_fork() else None,
            is_restarted=policy.max_restarts > 0,
            ends=ends,
        )
        failed_at = time.time()
        if ended.reached_step is not None:  # metrics are written at once, heartbeats every second
            ended = replace(ended, reached_step=max(ended.reached_step, last_step(run_dir)))
        smaller = None if node else smaller_microbatch(run)
        history, action = decide(
            history,
            ended,
            policy,
            published_step=published_step(run_dir),
            can_shrink_microbatch=smaller is not None,
        )
        if isinstance(action, End):
            _report_end(action, run_dir, node, history)
            if ends is not None and action.code not in (EXIT_DONE, EXIT_INTERRUPTED):
                ends.end(action.code, action.reason or ended.text)
            return action.code
        if action.has_smaller_microbatch and smaller is not None:
            run, overrides = smaller, microbatch_overrides(smaller)
        _report_restart(action, ended, run, run_dir, node, history, failed_at)
        time.sleep(action.delay_seconds)


def published_step(run_dir: Path) -> int:
    """The step of the newest complete checkpoint in a run directory; 0 where there is none."""
    names = (path.parent.name for path in run_dir.glob("checkpoints/step-*/manifest.json"))
    steps = (name.removeprefix("step-") for name in names)
    return max((int(step) for step in steps if step.isdecimal()), default=0)


def _report_restart(
    restart: Restart,
    ended: AttemptEnd,
    run: RunSpec,
    run_dir: Path,
    node: LaunchedNode | None,
    history: History,
    failed_at: float,
) -> None:
    """Print the restart, and write it to the events of the first rank here, which has ended."""
    start = f"step {history.published_step}" if history.published_step else "step 0: there is no checkpoint"
    size = run.data.microbatch_sequences
    if restart.has_smaller_microbatch:
        text = f"out of memory: restarting with data.microbatch_sequences={size} from the newest checkpoint"
    else:
        why = ended.text.partition(";")[0]
        wait = f" in {restart.delay_seconds:g} s" if restart.delay_seconds else ""
        text = f"restart {restart.number}{wait} from {start} ({why}; {restart.lost_steps} steps to repeat)"
    print(text, file=sys.stderr, flush=True)
    with EventWriter(run_dir, rank=_first_rank(run, node)) as events:
        events.write(
            "restart",
            text=text,
            cause=ended.cause,
            attempt=restart.number,
            step=history.published_step,
            lost_steps=restart.lost_steps,
            failed_at=failed_at,
            microbatch_sequences=size,
        )


def _report_end(end: End, run_dir: Path, node: LaunchedNode | None, history: History) -> None:
    """Say why there is no further restart, where the ranks have not said it."""
    if not end.reason:
        return
    print(
        f"error: {end.reason}",
        f"  where: {run_dir}",
        "  hint:  the lines above say why the ranks ended; the newest checkpoint is of step "
        f"{history.published_step}",
        sep="\n",
        file=sys.stderr,
        flush=True,
    )
    if run_dir.is_dir() and node is None:
        with EventWriter(run_dir, rank=0) as events:
            events.write("failure", step=history.published_step, text=end.reason, exit_code=end.code)


def _first_rank(run: RunSpec, node: LaunchedNode | None) -> int:
    return node.node * node.num_local_ranks(run.parallel.num_ranks) if node else 0
