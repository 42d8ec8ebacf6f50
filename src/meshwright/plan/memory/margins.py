"""How far the predicted memory may be from what a run of our runtime allocates, by the kind of run.

Shares are the largest errors of layouts of each kind that were drawn at random and traced; the trace equals
the card. `python -m tests.support.memory_agreement` measures them again. The drawn layouts are small (under
4 GiB), where a bucket or a mask weighs more than in a large run.
"""

from typing import NamedTuple

from meshwright.plan.framework import Framework
from meshwright.plan.memory.phases import covered_layouts, is_covered
from meshwright.plan.workload.layouts import Layouts
from meshwright.plan.workload.schedules import SCHEDULES
from meshwright.plan.workload.workload import Workload
from meshwright.spec.rules_parallel import SPLIT_BACKWARD
from meshwright.units import show_bytes


class Margin(NamedTuple):
    """Of allocated bytes, both ways."""

    share: float
    kind: str
    """What it was measured on."""
    num_bytes: float = 0.0
    """Beside the share."""

    def of(self, allocated_bytes: float) -> float:
        """Bytes that so many may be off."""
        return self.share * allocated_bytes + self.num_bytes

    @property
    def words(self) -> str:
        """For people."""
        beside = f" and {show_bytes(self.num_bytes)}" if self.num_bytes else ""
        return f"within {self.share:.0%}{beside} ({self.kind})"


# Seeds, counts and means stand in docs/concepts/prediction.md.
DENSE = Margin(0.09, "dense layers, by the trace's table")
OVER_CP = Margin(0.09, "context parallel, by the trace's table")
LATENT = Margin(0.30, "latent attention, by the trace's table")
ROUTED = Margin(0.091, "routed experts, by the trace's table")
ROUTED_GATHERED = Margin(0.17, "routed experts over ep with ZeRO-3, by the trace's table")
COMPILED = Margin(0.10, "compiled blocks, by the trace's table")
LOW_PRECISION = Margin(0.16, "fp8, by the trace's table")
INTERLEAVED = Margin(0.095, "ZeRO-2 or 3 with several stages on a rank")
SPLIT = Margin(0.15, "split backwards, by the trace's table")
ADAPTERS = Margin(0.45, "adapters, by formula; traces of small layouts are inside", 64 * 2**20)
FORMULA = Margin(0.45, "estimated by formula, not compared with a trace")


def memory_margin(work: Workload, at: Layouts, stack: Framework) -> Margin | None:
    """Of one layout; None where another framework runs it."""
    if not stack.is_traced:
        return None
    return max(_margins(work, at, stack), key=lambda one: one.of(2**30))


def _margins(work: Workload, at: Layouts, stack: Framework) -> list[Margin]:
    is_moved = bool(at.offloads("activations")[0] or at.offloads("parameters")[0])
    if work.adapters is not None and covered_layouts(at).all() and not is_moved:
        return [ADAPTERS]
    if is_moved or not (is_covered(work, stack) and covered_layouts(at).all()):
        return [FORMULA]
    found = [DENSE]
    if work.model.moe is not None:
        found.append(ROUTED_GATHERED if at.ep[0] > 1 and at.zero[0] == 3 else ROUTED)
    if work.model.attention.latent is not None:
        found.append(LATENT)
    if at.cp[0] > 1:
        found.append(OVER_CP)
    if work.compiled:
        found.append(COMPILED)
    if work.is_low_precision:
        found.append(LOW_PRECISION)
    if at.pp[0] > 1 and at.virtual_stages[0] > 1 and at.zero[0] >= 2:
        found.append(INTERLEAVED)
    if at.pp[0] > 1 and SCHEDULES[int(at.schedule[0])] in SPLIT_BACKWARD:
        found.append(SPLIT)
    return found
