"""Reads what a plan or a refusal claims, as a user would, and lists where the claims contradict the answer.

The sentences are read as text on purpose: a number that is right in an object and wrong in the sentence
misleads the user all the same.
"""

import re
from collections.abc import Iterator
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.hardware.catalogue import parse_cluster
from meshwright.plan.draw.document import plan_document
from meshwright.plan.explain.neighbours import neighbours
from meshwright.plan.explain.reasons import explain
from meshwright.plan.make_plan import make_plan
from meshwright.plan.search.pins import parse_pins
from meshwright.plan.search.question import Objective
from meshwright.plan.search.request import Request, fill_request
from meshwright.plan.search.search import TIE_FRACTION

_SECONDS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "days": 86400.0, "years": 31557600.0}
_BYTES = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_TIME = rf"([\d.]+) ({'|'.join(_SECONDS)})\b"
_SIZE = rf"([\d.]+) ({'|'.join(_BYTES)})\b"
ROUNDING = 0.011
"""Printed numbers have three digits."""
Document = dict[str, Any]


def ask(
    model: str,
    on: str,
    *pins: str,
    seq: int | None = None,
    batch_tokens: int | None = None,
    allow: str | None = None,
    objective: Objective = "speed",
) -> Document | MeshwrightError:
    """What `meshwright plan MODEL --on CLUSTER PINS --json` answers, or its error."""
    try:
        request = Request(
            model, parse_cluster(on), parse_pins(pins), seq, batch_tokens, allow=allow, objective=objective
        )
        filled = fill_request(request)
        plan = make_plan(filled.question)
    except MeshwrightError as error:
        return error
    why, near = explain(plan), neighbours(plan)
    document = plan_document(plan, tokens=filled.tokens, assumed=filled.assumed, why=why, neighbours=near)
    return {**document, "budget_bytes": filled.question.memory_budget_bytes}


def self_refuting(document: Document) -> list[str]:
    """Sentences and rows that name something that fits, is allowed, and beats the choice by the margin."""
    return list(_faster_claims(document)) if document["objective"] == "speed" else []


def _faster_claims(document: Document) -> Iterator[str]:
    chosen = document["best"]["step_seconds"]
    limit = chosen / (1.0 + TIE_FRACTION) * (1.0 - ROUNDING)
    for row in document["top"]:
        if row["step_seconds"] < limit:
            yield f"a row of the table takes {row['step_seconds']:.4g} s, the choice {chosen:.4g} s"
    for each in document["neighbours"]:
        if each["step_seconds"] is not None and each["step_seconds"] < limit:
            yield f"{each['change']}: {each['reason']}"
    for sentence in document["why"]:
        seconds = [float(number) * _SECONDS[unit] for number, unit in re.findall(_TIME, sentence)]
        if any(each < limit for each in _alternatives(sentence, seconds)):
            yield sentence


def _alternatives(sentence: str, seconds: list[float]) -> list[float]:
    """Step times of a sentence that belong to an alternative: those of sentences that compare with one."""
    compares = re.search(r"[Ww]ithout|keeping all|would take|instead of", sentence)
    return seconds if compares and "does not fit" not in sentence and "not fit." not in sentence else []


def contradictory(answer: Document | MeshwrightError) -> list[str]:
    """Sentences that say that something does not fit, with a number that does."""
    if isinstance(answer, MeshwrightError):
        return list(_refusal(answer))
    sentences = [*answer["why"], *(f"{each['change']}: {each['reason']}" for each in answer["neighbours"])]
    return [each for each in sentences if _is_contradictory(each, answer["budget_bytes"])]


def _is_contradictory(sentence: str, budget: float) -> bool:
    if "host memory" in sentence or not re.search(r"nothing fits|does not fit|not fit\.", sentence):
        return False
    if "does not fit on one device" in sentence:
        return False
    need = re.search(rf"(?:would need|at least|does not fit:) {_SIZE}", sentence)
    return need is not None and float(need[1]) * _BYTES[need[2]] < budget * (1.0 - ROUNDING)


def _refusal(error: MeshwrightError) -> Iterator[str]:
    """`needs 7.6 GiB of 60.2 GiB`."""
    for match in re.finditer(rf"needs? {_SIZE}[^,;:]*? of {_SIZE}", error.fact):
        need, unit, limit, limit_unit = match.groups()
        if float(need) * _BYTES[unit] < float(limit) * _BYTES[limit_unit]:
            yield error.fact
