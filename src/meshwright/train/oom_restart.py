"""`memory.on_oom=halve_microbatch`: ranks that ran out of memory are started anew with smaller micro-batches.

This is done by the process that starts the ranks, so nothing of it is in the path of a step. It imports no
torch. The global batch stays as it is: smaller micro-batches mean more of them per step.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from meshwright.errors import EXIT_RANK_OUT_OF_MEMORY, EXIT_RUN_FAILED
from meshwright.launch.launched_node import launched_node
from meshwright.launch.local import run_local
from meshwright.launch.watch import Watched
from meshwright.observe.events import EventWriter
from meshwright.spec import RunSpec
from meshwright.spec.check import check


def run_ranks(run: RunSpec, arguments: Sequence[str], run_dir: Path) -> int:
    """Start the ranks of `meshwright <arguments>` on this machine until the run ends; returns the exit code.

    Where a platform has started one process per node, these are the ranks of this node, and all of the run's
    ranks join; they watch each other, as those of other launchers do.
    After an OOM, where the run allows it, the ranks are started with the next smaller micro-batch and resume
    from the newest checkpoint in `run_dir`, or start from step 0 where there is none.
    """
    node = launched_node()
    if node is not None:
        code = run_local(arguments, num_ranks=node.num_local_ranks(run.parallel.num_ranks), node=node)
        return EXIT_RUN_FAILED if code == EXIT_RANK_OUT_OF_MEMORY else code
    watched = Watched(run_dir, run.resilience)
    code = run_local(arguments, num_ranks=run.parallel.num_ranks, watched=watched)
    while code == EXIT_RANK_OUT_OF_MEMORY and run.memory.on_oom == "halve_microbatch":
        smaller = smaller_microbatch(run)
        if smaller is None:
            break
        run = smaller
        _announce(run, run_dir)
        more = [*arguments, *_overrides(run)]
        code = run_local(more, num_ranks=run.parallel.num_ranks, watched=watched)
    return EXIT_RUN_FAILED if code == EXIT_RANK_OUT_OF_MEMORY else code


def smaller_microbatch(run: RunSpec) -> RunSpec | None:
    """The run with half the micro-batch, or the next smaller divisor of it; None where there is none.

    `on_oom` becomes `stop` at one sequence: it has no effect there.
    """
    size = run.data.microbatch_sequences
    smaller = next((part for part in range(size // 2, 0, -1) if size % part == 0), None)
    if smaller is None:
        return None
    changed = run.with_(data=run.data.with_(microbatch_sequences=smaller))
    if smaller == 1:
        changed = changed.with_(memory=run.memory.with_(on_oom="stop"))
    return None if check(changed) else changed


def _overrides(run: RunSpec) -> list[str]:
    """What `smaller_microbatch` changed, as overrides on the command line; the last of several counts."""
    return [
        f"data.microbatch_sequences={run.data.microbatch_sequences}",
        f"memory.on_oom={run.memory.on_oom}",
    ]


def _announce(run: RunSpec, run_dir: Path) -> None:
    """Print the restart, and write it to the events of rank 0, which has ended."""
    size = run.data.microbatch_sequences
    text = f"out of memory: restarting with data.microbatch_sequences={size} from the newest checkpoint"
    print(text, file=sys.stderr, flush=True)
    with EventWriter(run_dir, rank=0) as events:
        events.write("restart", text=text, microbatch_sequences=size)
