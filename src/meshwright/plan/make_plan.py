"""From a question to a plan, or to an error that lists the changes with which there is one."""

import time

from meshwright.plan.explain.infeasible import infeasible
from meshwright.plan.search.choose_precision import choose_precision
from meshwright.plan.search.decision import Plan, choose
from meshwright.plan.search.question import Question


def make_plan(question: Question, *, top: int = 8) -> Plan:
    """The best plan and `top` alternatives.

    PlanError where nothing fits, with the changes that would; SpecError where the pins contradict a rule.
    """
    start = time.perf_counter()
    chosen = choose_precision(question)
    if len(chosen.result.fitting) == 0:
        raise infeasible(question, chosen)
    return choose(chosen, top=top, search_seconds=time.perf_counter() - start)
