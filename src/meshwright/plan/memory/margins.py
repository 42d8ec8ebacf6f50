"""How far the closed form of memory may be from what a run of our runtime allocates, by the kind of run.

Shares are the largest errors of layouts of each kind that were drawn at random and traced; the trace equals
the card. Drawn layouts are small (under 2 GiB). Compiled blocks were measured on models of 1B to 8B too: what
is off on small ones are flat buffers of a fixed size, so that their margin has bytes beside a share. Tests
hold the first two kinds; the others are told so that nobody takes them for exact, and `rehearse` traces them.
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
EXACT = Margin(0.01, "dense layers, held against traces")
ROUTED = Margin(0.04, "routed experts, held against traces")
ROUTED_SHARDS = Margin(0.10, "routed experts with ZeRO-3 and ep, priced in part by shares")
TURNS = Margin(0.28, "ZeRO-2 or 3 with interleaved stages, or one round of turns, priced by shares")
COMPILED = Margin(0.05, "compiled blocks, priced by shares", num_bytes=0.35 * 2**30)
SPLIT = Margin(0.38, "split backwards, priced by shares")
NARROW = Margin(0.45, "fp8 without the compiler, priced by shares")
OTHER = Margin(0.45, "priced by shares, held against nothing")


def memory_margin(work: Workload, at: Layouts, stack: Framework) -> Margin | None:
    """Of one layout; None where another framework runs it."""
    if stack.name != "meshwright":
        return None
    return max(_margins(work, at, stack), key=lambda one: one.of(2**30))


def _margins(work: Workload, at: Layouts, stack: Framework) -> list[Margin]:
    schedule = SCHEDULES[int(at.schedule[0])]
    found = [EXACT if work.model.moe is None else ROUTED]
    if work.is_low_precision and not work.compiled:
        found.append(NARROW)
    if work.compiled:
        found.append(COMPILED)
    if at.pp[0] > 1 and schedule in SPLIT_BACKWARD:
        found.append(SPLIT)
    if at.pp[0] > 1 and at.virtual_stages[0] > 1:
        found.append(TURNS if not covered_layouts(at).all() else EXACT)
    if work.model.moe is not None and at.zero[0] == 3 and at.ep[0] > 1:
        found.append(ROUTED_SHARDS)
    is_known = is_covered(work, stack) and covered_layouts(at).all()
    return found if is_known or len(found) > 1 else [OTHER]
