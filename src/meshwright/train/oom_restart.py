"""`memory.on_oom=halve_microbatch`: ranks that ran out of memory are started anew with smaller micro-batches.

This is done by the process that starts the ranks, so nothing of it is in the path of a step. It imports no
torch. The global batch stays as it is: smaller micro-batches mean more of them per step.
"""

from meshwright.spec import RunSpec
from meshwright.spec.check import check


def smaller_microbatch(run: RunSpec) -> RunSpec | None:
    """The run with half the micro-batch, or the next smaller divisor of it; None where there is none, or with
    `on_oom=stop`.

    `on_oom` becomes `stop` at one sequence: it has no effect there.
    """
    if run.memory.on_oom != "halve_microbatch":
        return None
    size = run.data.microbatch_sequences
    smaller = next((part for part in range(size // 2, 0, -1) if size % part == 0), None)
    if smaller is None:
        return None
    changed = run.with_(data=run.data.with_(microbatch_sequences=smaller))
    if smaller == 1:
        changed = changed.with_(memory=run.memory.with_(on_oom="stop"))
    return None if check(changed) else changed
