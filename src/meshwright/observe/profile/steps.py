"""How many steps a profile makes."""

from dataclasses import dataclass

UNTIMED_STEPS = 2
"""Steps at the start that are not timed: they compile, and the allocator grows."""
STACK_STEPS = 2
"""Steps of the trace with stacks: a warm-up and the recorded one."""


@dataclass(frozen=True)
class ProfileSteps:
    """Steps without the profiler, as its warm-up, and recorded."""

    wait: int = 6
    warmup: int = 1
    active: int = 2

    def total(self, *, with_stacks: bool) -> int:
        """All steps of a profile."""
        return self.wait + self.warmup + self.active + (STACK_STEPS if with_stacks else 0)
