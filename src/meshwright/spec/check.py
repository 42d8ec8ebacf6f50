"""Every cross-field rule of a run, shared by `check`, the planner and the docs.

A rule is a small named function from a run to its violations; its docstring is its text in the docs.
The rules are independent: all are checked, and all violations are reported at once.
"""

from collections.abc import Callable, Iterator

from meshwright.errors import SpecError, SpecErrors
from meshwright.spec.rules_adapter import ADAPTER_RULES
from meshwright.spec.rules_checkpoint import CHECKPOINT_RULES
from meshwright.spec.rules_data import DATA_RULES
from meshwright.spec.rules_launch import LAUNCH_RULES
from meshwright.spec.rules_memory import MEMORY_RULES
from meshwright.spec.rules_model import MODEL_RULES
from meshwright.spec.rules_parallel import PARALLEL_RULES
from meshwright.spec.rules_preference import PREFERENCE_RULES
from meshwright.spec.rules_run import RUN_RULES
from meshwright.spec.run import RunSpec

Rule = Callable[[RunSpec], Iterator[SpecError]]
RULES: list[Rule] = [
    *MODEL_RULES,
    *ADAPTER_RULES,
    *PARALLEL_RULES,
    *MEMORY_RULES,
    *DATA_RULES,
    *PREFERENCE_RULES,
    *RUN_RULES,
    *CHECKPOINT_RULES,
    *LAUNCH_RULES,
]


def check(run: RunSpec) -> list[SpecError]:
    """Every violation of every rule; empty when the run can start."""
    return [violation for rule in RULES for violation in rule(run)]


def is_valid(run: RunSpec) -> bool:
    """Whether no rule is broken; stops at the first violation."""
    return not any(True for rule in RULES for _ in rule(run))


def require_valid(run: RunSpec) -> RunSpec:
    """The run itself, when no rule is broken."""
    violations = check(run)
    if violations:
        raise SpecErrors(violations)
    return run
