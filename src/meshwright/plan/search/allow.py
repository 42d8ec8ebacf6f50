"""Changes of number formats and optimizer that `plan --allow fp8,bf16_weights` permits.

Every layout computes the same training run. Number formats and the optimizer change its numerics, so the
search uses only the changes that the user allows, and among equally good plans the one that changes least.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from meshwright.errors import SpecError
from meshwright.plan.search.pins import Pins
from meshwright.plan.search.question import Question
from meshwright.spec.base import Spec
from meshwright.spec.check import check
from meshwright.spec.optim import OptimSpec
from meshwright.spec.precision import PrecisionSpec
from meshwright.spec.run import RunSpec
from meshwright.spec.violations import nearest


@dataclass(frozen=True)
class NumericsChange:
    """One change of the numerics: a key of the run and the value that it takes."""

    name: str
    """What the user writes after `--allow`."""
    key: str
    value: str
    meaning: str
    weight: int
    """How much the change alters what is computed."""

    @property
    def setting(self) -> str:
        """`precision.weights=bf16_exact`."""
        return f"{self.key}={self.value}"

    @property
    def default(self) -> Any:
        """The value of the key in a run that does not set it."""
        section, name = self.key.split(".")
        return SECTIONS[section].model_fields[name].default

    def is_set(self, run: RunSpec) -> bool:
        """Whether the run has a value of its own for the key."""
        section, name = self.key.split(".")
        return bool(getattr(getattr(run, section), name) != self.default)


NUMERICS_CHANGES = (
    NumericsChange("bf16_weights", "precision.weights", "bf16_exact", "weights in bf16, lower bits exact", 1),
    NumericsChange(
        *("stochastic_weights", "precision.weights", "bf16_stochastic"),
        meaning="weights in bf16, stochastic rounding",
        weight=3,
    ),
    NumericsChange("bf16_gradients", "precision.gradients", "bf16", "gradients in bf16", 2),
    NumericsChange("bf16_moments", "optim.state", "bf16", "moments in bf16", 2),
    NumericsChange("adamw_8bit", "optim.kind", "adamw_8bit", "moments in 8 bits", 3),
    NumericsChange("adafactor", "optim.kind", "adafactor", "adafactor instead of adamw", 6),
    NumericsChange("sgd", "optim.kind", "sgd", "sgd with momentum instead of adamw", 8),
    NumericsChange("fp8", "precision.fp8", "current", "linear layers in fp8", 4),
)
"""Within a key, later changes need less memory."""
BY_NAME_ONLY = ("adafactor", "sgd")
"""Other optimizers need other hyper-parameters, so `all` does not include them."""
SECTIONS: dict[str, type[Spec]] = {"precision": PrecisionSpec, "optim": OptimSpec}
KEYS = tuple(dict.fromkeys(change.key for change in NUMERICS_CHANGES))
NAMES = tuple(change.name for change in NUMERICS_CHANGES)


@dataclass(frozen=True)
class Variant:
    """The question with some of the changes made."""

    question: Question
    changes: tuple[NumericsChange, ...] = ()

    @property
    def weight(self) -> int:
        """How much the changes alter what is computed."""
        return sum(change.weight for change in self.changes)


def parse_allow(text: str | None) -> tuple[str, ...]:
    """The names after `--allow`; the error for an unknown one suggests the nearest."""
    names = [name.strip() for name in (text or "").split(",") if name.strip()]
    for name in names:
        if name not in (*NAMES, "all"):
            hint = f"{nearest(name, [*NAMES, 'all'])} use {', '.join(NAMES)}, or all".strip()
            raise SpecError(f"--allow {name}: there is no such change", where="--allow", hint=hint)
    if "all" in names:
        names += [name for name in NAMES if name not in BY_NAME_ONLY]
    return tuple(name for name in NAMES if name in names)


def reject_pinned(text: str | None, pins: Pins) -> None:
    """SpecError for a change that is allowed by name while its key is pinned: it would have no effect."""
    names = [name.strip() for name in (text or "").split(",")]
    for change in NUMERICS_CHANGES:
        pin = pins.override_of(change.key)
        if change.name in names and pin is not None:
            fact = f"--allow {change.name} has no effect: {pin} is pinned"
            raise SpecError(fact, where="--allow", hint="leave one of them out")


def variants(question: Question) -> list[Variant]:
    """The question with every combination of the changes that it allows, from the least change on."""
    allowed = [
        each for each in NUMERICS_CHANGES if each.name in question.allow and _is_usable(each, question)
    ]
    options = [[None, *(each for each in allowed if each.key == key)] for key in KEYS]
    found = [_variant(question, [each for each in chosen if each]) for chosen in product(*options)]
    return sorted((each for each in found if each is not None), key=lambda each: each.weight)


def corners(listed: Sequence[Variant]) -> list[Variant]:
    """The unchanged run, and for every optimizer, with and without fp8, the variant with the least state.

    Fewer bytes for weights, gradients or moments never make a plan larger or slower, so no variant between
    these has a faster plan.
    """
    last: dict[tuple[str, bool], Variant] = {}
    for each in listed:
        run = each.question.run
        last[run.optim.kind, run.precision.fp8 is not None] = each
    return list({id(each): each for each in (*listed[:1], *last.values())}.values())


def single_changes(question: Question) -> Iterator[Variant]:
    """The question with one change that it does not allow yet; bf16 gradients need bf16 weights."""
    for change in NUMERICS_CHANGES:
        is_new = change.name not in question.allow and change.name not in BY_NAME_ONLY
        found = _variant(question, [change]) if is_new and _is_usable(change, question) else None
        if found is not None:
            yield found


def _is_usable(change: NumericsChange, question: Question) -> bool:
    """Whether the device can do it, and neither a pin nor the run sets the key."""
    lacks_fp8 = change.name == "fp8" and "fp8" not in question.cluster.device.peak_flops_per_second
    is_pinned = question.pins.override_of(change.key) is not None
    return not is_pinned and not lacks_fp8 and not change.is_set(question.run)


def _variant(question: Question, changes: Sequence[NumericsChange]) -> Variant | None:
    """The question with these changes; None where the rules forbid them together."""
    sections: dict[str, dict[str, str]] = {}
    for change in changes:
        section, name = change.key.split(".")
        sections.setdefault(section, {})[name] = change.value
    run = question.run
    run = run.with_(**{name: getattr(run, name).with_(**values) for name, values in sections.items()})
    return Variant(replace(question, run=run), tuple(changes)) if not changes or not check(run) else None
