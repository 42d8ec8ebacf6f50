"""The process that starts the ranks, watches them, and starts them again after a failure.

`resilience/supervisor.py` decides; this file starts processes, waits, prints and writes events. It imports no
torch.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from meshwright.checkpoint.local_marker import local_step
from meshwright.errors import EXIT_DONE, EXIT_INTERRUPTED
from meshwright.launch.attempt import AttemptEnd
from meshwright.launch.heartbeat import remove_heartbeats
from meshwright.launch.launched_node import LaunchedNode, launched_node
from meshwright.launch.local import run_attempt
from meshwright.launch.node_ends import NodeEnds
from meshwright.launch.rank_process import Program, can_fork
from meshwright.launch.watch import Watched
from meshwright.observe.events import EventWriter
from meshwright.observe.metrics import last_step
from meshwright.resilience.supervisor import End, History, Restart, decide
from meshwright.spec import RunSpec
from meshwright.train.elastic_nodes import ElasticNodes
from meshwright.train.elastic_ranks import ElasticRanks
from meshwright.train.oom_restart import smaller_microbatch

_POLL_SECONDS = 0.1


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
    node, elastic = launched_node(), run.resilience.elastic
    ranks = ElasticNodes(run, elastic, node, run_dir) if node and elastic else ElasticRanks(run, node)
    ends = NodeEnds(run_dir, node.node) if node else None
    if ends is not None:
        ends.begin()
    history = History(published_step=published_step(run_dir))
    while True:
        code = ranks.begin()
        if code is not None:
            return code
        ended = _attempt(ranks, arguments, run_dir, program=program, ends=ends)
        failed_at, mesh_change = time.time(), ranks.after(ended)
        can_shrink = isinstance(ranks, ElasticRanks) and node is None
        smaller = smaller_microbatch(ranks.run) if can_shrink else None
        history, action = decide(
            history,
            ended,
            run.resilience.restart,
            published_step=published_step(run_dir),
            can_shrink_microbatch=smaller is not None,
            has_new_mesh=bool(mesh_change),
        )
        if isinstance(action, End):
            _report_end(action, run_dir, node, history)
            ranks.end(action.code)
            if ends is not None and action.code not in (EXIT_DONE, EXIT_INTERRUPTED):
                ends.end(action.code, action.reason or ended.text)
            return action.code
        if smaller is not None and action.has_smaller_microbatch and isinstance(ranks, ElasticRanks):
            ranks.shrink_microbatch(smaller)
        text = _restart_text(action, ended, ranks.run, history, mesh_change)
        _report_restart(text, action, ended, ranks, run_dir, failed_at)
        _pause(action.delay_seconds, ranks)


def _pause(seconds: float, ranks: ElasticRanks | ElasticNodes) -> None:
    """Wait before a restart; other nodes see that this one lives, and a change of the nodes ends the wait."""
    ends_at = time.monotonic() + seconds
    while (left := ends_at - time.monotonic()) > 0 and ranks.change() is None:
        time.sleep(min(left, _POLL_SECONDS))


def _attempt(
    ranks: ElasticRanks | ElasticNodes,
    arguments: Sequence[str],
    run_dir: Path,
    *,
    program: Program | None,
    ends: NodeEnds | None,
) -> AttemptEnd:
    """Start the ranks once, and wait until they have ended."""
    run, node = ranks.run, ranks.node
    if run.resilience.elastic is not None:
        remove_heartbeats(run_dir, first_rank=run.parallel.num_ranks)
    ended = run_attempt(
        [*arguments, *ranks.overrides],
        num_ranks=node.num_local_ranks(run.parallel.num_ranks) if node else run.parallel.num_ranks,
        watched=Watched(run_dir, run.resilience, is_adaptive=not run.compile),
        node=node,
        program=program if can_fork() else None,
        interrupted=lambda: (ends.interruption() if ends else None) or ranks.change(),
        devices=ranks.devices,
    )
    other = ends.interruption() if ends and ended.cause != "done" else None
    if other is not None:
        print(f"error: {other.text}", file=sys.stderr)
        return AttemptEnd(other.cause, other.code, other.text, ended.reached_step)
    if ended.reached_step is None:
        return ended
    # Metrics are written at once, heartbeats every second.
    return replace(ended, reached_step=max(ended.reached_step, last_step(run_dir)))


def published_step(run_dir: Path) -> int:
    """The step of the newest complete checkpoint in a run directory or on its nodes; 0 without any."""
    names = (path.parent.name for path in run_dir.glob("checkpoints/step-*/manifest.json"))
    steps = (name.removeprefix("step-") for name in names)
    newest = max((int(step) for step in steps if step.isdecimal()), default=0)
    return max(newest, local_step(run_dir / "checkpoints"))


def _restart_text(
    restart: Restart, ended: AttemptEnd, run: RunSpec, history: History, mesh_change: str
) -> str:
    """One line about a restart: why, from where, and what is different."""
    step = history.published_step
    start = f"step {step}" if step else "step 0: there is no checkpoint"
    mesh = f"; {mesh_change}" if mesh_change else ""
    if restart.has_smaller_microbatch:
        what = f"data.microbatch_sequences={run.data.microbatch_sequences}"
        return f"out of memory: restarting with {what} from the newest checkpoint{mesh}"
    if ended.cause == "resized":
        return f"{ended.text}, from {start}"
    why = ended.text.partition(";")[0]
    wait = f" in {restart.delay_seconds:g} s" if restart.delay_seconds else ""
    return f"restart {restart.number}{wait} from {start} ({why}; {restart.lost_steps} steps to repeat){mesh}"


def _report_restart(
    text: str,
    restart: Restart,
    ended: AttemptEnd,
    ranks: ElasticRanks | ElasticNodes,
    run_dir: Path,
    failed_at: float,
) -> None:
    """Print the restart, and write it to the events of the first rank here, which has ended."""
    print(text, file=sys.stderr, flush=True)
    run, node = ranks.run, ranks.node
    with EventWriter(run_dir, rank=_first_rank(run, node)) as events:
        events.write(
            "restart",
            text=text,
            cause=ended.cause,
            attempt=restart.number,
            step=published_step(run_dir),
            lost_steps=restart.lost_steps,
            failed_at=failed_at,
            microbatch_sequences=run.data.microbatch_sequences,
            num_ranks=run.parallel.num_ranks,
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
