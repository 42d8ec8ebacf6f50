"""`plan --finetune auto`: which kind of fine-tuning fits, with the reason.

The order is that of the numerics: all weights, adapters on weights in bf16 (LoRA), adapters on weights in 4
bits (QLoRA). What needs host memory comes after everything that fits on the devices.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from meshwright.errors import PlanError, SpecError, SpecErrors
from meshwright.plan.explain.infeasible import infeasible
from meshwright.plan.search.candidate import Candidate
from meshwright.plan.search.choose_precision import ChosenPrecision, choose_precision
from meshwright.plan.search.decision import choose
from meshwright.plan.search.finetune import FineTuning
from meshwright.plan.search.question import Question
from meshwright.plan.search.request import FilledRequest
from meshwright.units import show_bytes

ON_DEVICES: tuple[FineTuning, ...] = ("full", "lora", "qlora")
WITH_OFFLOAD: tuple[FineTuning, ...] = ("lora", "qlora", "full")
"""Full fine-tuning moves its states at every step, adapters only activations."""
TITLES: dict[FineTuning, str] = {
    "full": "full fine-tuning",
    "lora": "lora (frozen weights unquantised)",
    "qlora": "qlora (frozen weights in 4 bits)",
}


Fill = Callable[[str | None, Sequence[str]], FilledRequest]
"""Fills a request of this kind of fine-tuning, with these pins."""


class Chosen(NamedTuple):
    """A kind of fine-tuning and why it was chosen."""

    kind: FineTuning
    reasons: tuple[str, ...]


def fill_finetune(
    finetune: str | None, pins: Sequence[str], fill: Fill
) -> tuple[FilledRequest, tuple[str, ...]]:
    """The request of a kind of fine-tuning; `auto` becomes the best that fits, with the reasons."""
    if finetune != "auto":
        return fill(finetune, pins), ()
    # Full fine-tuning has no adapter to pin.
    plain = [pin for pin in pins if not pin.startswith("adapter.")]

    def filled(kind: FineTuning) -> FilledRequest:
        return fill(kind, plain if kind == "full" else pins)

    found = choose_finetune(lambda kind: filled(kind).question)
    unused = [pin for pin in pins if pin not in plain] if found.kind == "full" else []
    reasons = (f"{pin} has no effect: full fine-tuning has no adapters" for pin in unused)
    return filled(found.kind), (*found.reasons, *reasons)


def choose_finetune(ask: Callable[[FineTuning], Question]) -> Chosen:
    """The first kind that fits without offload, else the first that fits with it.

    PlanError where none does: that of the last kind, which needs least memory.
    """
    questions, reasons = _possible(ask)
    for kind in ON_DEVICES:
        if kind not in questions:
            continue
        found = choose_precision(_on_devices(questions[kind]))
        if len(found.result.fitting):
            return Chosen(kind, (*reasons, _fits(kind, found), *_smaller(kind, questions)))
        reasons.append(_excess(kind, found))
    for kind in WITH_OFFLOAD:
        if kind in questions and questions[kind].may_offload:
            found = choose_precision(questions[kind])
            if len(found.result.fitting):
                return Chosen(kind, (*reasons, _fits(kind, found)))
    kind, last = list(questions.items())[-1]
    error = infeasible(last, choose_precision(last))
    if isinstance(error, PlanError):  # of this kind alone: without --finetune it would be another one
        fact = f"{error.fact}; that is {TITLES[kind]}, which needs least"
        error = PlanError(fact, where=error.where, hint=error.hint)
    raise error


def _possible(ask: Callable[[FineTuning], Question]) -> tuple[dict[FineTuning, Question], list[str]]:
    """The kinds that the model's rules allow, and why the others are none; full fine-tuning always is one."""
    questions: dict[FineTuning, Question] = {"full": ask("full")}
    reasons: list[str] = []
    for kind in ON_DEVICES[1:]:
        try:
            questions[kind] = ask(kind)
        except SpecError as error:
            fact = error.violations[0].fact if isinstance(error, SpecErrors) else error.fact
            reasons.append(f"{TITLES[kind]} is not possible: {fact}")
    return questions, reasons


def _on_devices(question: Question) -> Question:
    """The question with nothing in host memory, unless the user decided about offload."""
    if not question.may_offload:
        return question
    pins = replace(question.pins, overrides=(*question.pins.overrides, "memory.offload=[]"))
    return replace(question, pins=pins)


def _fits(kind: FineTuning, found: ChosenPrecision) -> str:
    best = choose(found, top=1, search_seconds=0.0).best
    moved = " and ".join(best.run.memory.offload)
    where = f", with {moved} in host memory," if moved else ""
    speed = best.tokens_per_second / best.num_ranks
    return f"{TITLES[kind]} fits{where} in {show_bytes(best.device_bytes)} at {speed:,.0f} tokens/s/GPU"


def _smaller(kind: FineTuning, questions: dict[FineTuning, Question]) -> Iterator[str]:
    """The next kind, which leaves more memory: it may need less recompute, and then it is faster."""
    for other in ON_DEVICES[ON_DEVICES.index(kind) + 1 :][:1]:
        if other in questions and questions[other].run.adapter != questions[kind].run.adapter:
            yield f"instead, {_fits(other, choose_precision(_on_devices(questions[other])))}"


def _excess(kind: FineTuning, found: ChosenPrecision) -> str:
    """What the layout that comes closest lacks."""
    if found.result.closest is None:
        return f"{TITLES[kind]} has no layout that fits on the devices alone"
    closest = Candidate(found.question, found.result.closest.layouts)
    budget = show_bytes(found.question.memory_budget_bytes)
    needed = f"{show_bytes(closest.device_bytes)} per device of {budget}"
    return f"{TITLES[kind]} does not fit on the devices alone: it needs {needed}"
