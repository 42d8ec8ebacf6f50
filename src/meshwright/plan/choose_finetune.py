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
from meshwright.spec.adapter import NF4_FORMATS
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
    questions, impossible = _possible(ask)
    reasons = list(impossible)
    for kind in ON_DEVICES:
        if kind not in questions:
            continue
        found = choose_precision(_on_devices(questions[kind]))
        if len(found.result.fitting):
            fits = _fits(kind, choose_precision(questions[kind]))
            return Chosen(kind, (*reasons, fits, *_smaller(kind, questions)))
        reasons.append(_excess(kind, found))
    for kind in WITH_OFFLOAD:
        if kind in questions and questions[kind].may_offload:
            found = choose_precision(questions[kind])
            if len(found.result.fitting):
                return Chosen(kind, (*reasons, _fits(kind, found, needs_offload=True)))
    kind, last = list(questions.items())[-1]
    error = infeasible(last, choose_precision(last))
    if isinstance(error, PlanError):  # of this kind alone: without --finetune it would be another one
        least = f"{_title(kind, last)}, which needs least" if len(questions) > 1 else _title(kind, last)
        fact = "; ".join((error.fact, f"that is {least}", *impossible))
        error = PlanError(fact, where=error.where, hint=error.hint)
    raise error


def _possible(ask: Callable[[FineTuning], Question]) -> tuple[dict[FineTuning, Question], list[str]]:
    """The kinds that the model's rules allow, and why the others are none; full fine-tuning always is one.

    SpecError where pins of the user leave neither kind with adapters: who pins them wants adapters.
    """
    questions: dict[FineTuning, Question] = {"full": ask("full")}
    errors: dict[FineTuning, SpecError] = {}
    for kind in ON_DEVICES[1:]:
        try:
            questions[kind] = ask(kind)
        except SpecError as error:
            errors[kind] = error
    if len(questions) == 1 and all(map(_is_of_pin, errors.values())):
        raise errors["lora"]
    if "lora" in questions and _base(questions["lora"]) in NF4_FORMATS:
        del questions["lora"]  # pinned to 4 bits, it is the next kind
    return questions, [
        f"{TITLES[kind]} is not possible: {_first(each).fact}" for kind, each in errors.items()
    ]


def _first(error: SpecError) -> SpecError:
    return error.violations[0] if isinstance(error, SpecErrors) else error


def _is_of_pin(error: SpecError) -> bool:
    return _first(error).where.startswith("command line adapter.")


def _base(question: Question) -> str | None:
    return None if question.run.adapter is None else question.run.adapter.base


def _title(kind: FineTuning, question: Question) -> str:
    """The kind, and the format of its frozen weights where a pin has another one than usual."""
    base = _base(question)
    return f"{kind} (frozen weights in fp8)" if base == "fp8" else TITLES[kind]


def _on_devices(question: Question) -> Question:
    """The question with nothing in host memory, unless the user decided about offload."""
    if not question.may_offload:
        return question
    pins = replace(question.pins, overrides=(*question.pins.overrides, "memory.offload=[]"))
    return replace(question, pins=pins)


def _fits(kind: FineTuning, found: ChosenPrecision, *, needs_offload: bool = False) -> str:
    """That it fits, in the figures of its plan, which may have offload also where it need not."""
    best = choose(found, top=1, search_seconds=0.0).best
    moved = " and ".join(best.run.memory.offload)
    where = f", with {moved} in host memory," if moved else ""
    if moved and not needs_offload and found.question.may_offload:
        where = f" without offload; the plan has {moved} in host memory, which is better here, and fits"
    speed = best.tokens_per_second / best.num_ranks
    fits = f"fits{where} in {show_bytes(best.device_bytes)} at {speed:,.0f} tokens/s/GPU"
    return f"{_title(kind, found.question)} {fits}"


def _smaller(kind: FineTuning, questions: dict[FineTuning, Question]) -> Iterator[str]:
    """The next kind, which leaves more memory: it may need less recompute, and then it is faster."""
    for other in ON_DEVICES[ON_DEVICES.index(kind) + 1 :][:1]:
        if other in questions and questions[other].run.adapter != questions[kind].run.adapter:
            found = choose_precision(questions[other])
            if len(found.result.fitting):
                yield f"instead, {_fits(other, found)}"


def _excess(kind: FineTuning, found: ChosenPrecision) -> str:
    """What the layout that comes closest lacks."""
    title = _title(kind, found.question)
    if found.result.closest is None:
        return f"{title} has no layout that fits on the devices alone"
    closest = Candidate(found.question, found.result.closest.layouts)
    budget = show_bytes(found.question.memory_budget_bytes)
    needed = f"{show_bytes(closest.device_bytes)} per device of {budget}"
    return f"{title} does not fit on the devices alone: it needs {needed}"
