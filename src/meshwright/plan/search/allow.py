"""What a plan may change about the numbers of a run, and only when it is allowed: `--allow fp8,bf16_weights`.

A layout computes the same thing however it is cut. Formats and the optimizer do not, so the search takes
them only from what the user allows, and of plans that are equally good the one that changes least.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from meshwright.errors import SpecError
from meshwright.hardware.catalogue import Device
from meshwright.spec.base import Spec
from meshwright.spec.check import check
from meshwright.spec.optim import OptimSpec
from meshwright.spec.precision import PrecisionSpec
from meshwright.spec.run import RunSpec
from meshwright.spec.violations import nearest


@dataclass(frozen=True)
class NumericsChange:
    """One change: a key of the run, the value it may take, and how much it changes what is computed."""

    word: str
    key: str
    value: str
    meaning: str
    weight: int

    def said(self) -> str:
        """As a setting of a run."""
        return f"{self.key}={self.value}"


NUMERICS_CHANGES = (
    NumericsChange("bf16_weights", "precision.weights", "bf16_exact", "weights in bf16, lower bits exact", 1),
    NumericsChange(
        "stochastic_weights", "precision.weights", "bf16_stochastic", "weights in bf16, rounded at random", 3
    ),
    NumericsChange("bf16_gradients", "precision.gradients", "bf16", "gradients in bf16", 2),
    NumericsChange("bf16_moments", "optim.state", "bf16", "moments in bf16", 2),
    NumericsChange("adamw_8bit", "optim.kind", "adamw_8bit", "moments in 8 bits", 3),
    NumericsChange("adafactor", "optim.kind", "adafactor", "adafactor instead of adamw", 6),
    NumericsChange("sgd", "optim.kind", "sgd", "sgd with momentum instead of adamw", 8),
    NumericsChange("fp8", "precision.fp8", "current", "linear layers in fp8", 4),
)
"""From narrow to wide within a key, the later ones need less memory."""
BY_NAME_ONLY = ("adafactor", "sgd")
"""Other update rules want other settings, so `all` leaves them out."""
SECTIONS: dict[str, type[Spec]] = {"precision": PrecisionSpec, "optim": OptimSpec}
KEYS = tuple(dict.fromkeys(each.key for each in NUMERICS_CHANGES))
WORDS = tuple(each.word for each in NUMERICS_CHANGES)


@dataclass(frozen=True)
class Variant:
    """A run in some of the allowed formats."""

    run: RunSpec
    changes: tuple[NumericsChange, ...] = ()

    @property
    def weight(self) -> int:
        """How much it changes what is computed."""
        return sum(change.weight for change in self.changes)


def parse_allow(text: str | None) -> tuple[str, ...]:
    """The words of `--allow`; an unknown one suggests the nearest."""
    words = [word.strip() for word in (text or "").split(",") if word.strip()]
    for word in words:
        if word not in (*WORDS, "all"):
            hint = f"{nearest(word, [*WORDS, 'all'])} use {', '.join(WORDS)}, or all".strip()
            raise SpecError(f"--allow {word}: there is no such change", where="--allow", hint=hint)
    if "all" in words:
        words += [word for word in WORDS if word not in BY_NAME_ONLY]
    return tuple(word for word in WORDS if word in words)


def reject_pinned(text: str | None, overrides: Sequence[str]) -> None:
    """A change that is allowed by name and whose key is pinned would have no effect."""
    said = [word.strip() for word in (text or "").split(",")]
    for allowance in NUMERICS_CHANGES:
        for pin in overrides:
            if allowance.word in said and pin.partition("=")[0].strip() == allowance.key:
                fact = f"--allow {allowance.word} has no effect: {pin} is pinned"
                raise SpecError(fact, where="--allow", hint="leave one of them out")


def variants(run: RunSpec, allow: Sequence[str], pinned: Sequence[str], device: Device) -> list[Variant]:
    """The run as it is and in every combination of formats that is allowed, from the least change on."""
    options = [
        [
            None,
            *(
                each
                for each in NUMERICS_CHANGES
                if each.key == key and _may(each, allow, pinned, device, run)
            ),
        ]
        for key in KEYS
    ]
    found = [_variant(run, tuple(each for each in chosen if each)) for chosen in product(*options)]
    return sorted((each for each in found if each is not None), key=lambda each: each.weight)


def corners(listed: Sequence[Variant]) -> list[Variant]:
    """The run as it is, and for every optimizer, with and without fp8, the variant with the least state.

    A narrower format of weights, gradients or moments is never larger and never slower, so that no variant
    between these has a faster plan.
    """
    last: dict[tuple[str, bool], Variant] = {}
    for each in listed:
        last[each.run.optim.kind, each.run.precision.fp8 is not None] = each
    return list({id(each): each for each in (*listed[:1], *last.values())}.values())


def single_changes(
    run: RunSpec, allow: Sequence[str], pinned: Sequence[str], device: Device
) -> Iterator[Variant]:
    """One change each, of those that are not allowed yet; gradients in bf16 go with weights in bf16."""
    for allowance in NUMERICS_CHANGES:
        if allowance.word in allow or allowance.word in BY_NAME_ONLY:
            continue
        if _may(allowance, (allowance.word,), pinned, device, run):
            found = _variant(run, (allowance,))
            if found is not None:
                yield found


def _may(
    allowance: NumericsChange, allow: Sequence[str], pinned: Sequence[str], device: Device, run: RunSpec
) -> bool:
    is_pinned = any(word.partition("=")[0].strip() == allowance.key for word in pinned)
    lacks_fp8 = allowance.word == "fp8" and "fp8" not in device.peak_flops_per_second
    return allowance.word in allow and not is_pinned and not lacks_fp8 and not _is_set(allowance, run)


def _is_set(allowance: NumericsChange, run: RunSpec) -> bool:
    """The run says it already, or has said something that is no default."""
    section, name = allowance.key.split(".")
    return bool(getattr(getattr(run, section), name) != default_of(allowance))


def default_of(allowance: NumericsChange) -> Any:
    """The value of its key in a run that says nothing."""
    section, name = allowance.key.split(".")
    spec: type[Spec] = SECTIONS[section]
    return spec.model_fields[name].default


def _variant(run: RunSpec, changes: tuple[NumericsChange, ...]) -> Variant | None:
    """The run with these changes; None where the rules refuse them together."""
    sections: dict[str, dict[str, str]] = {}
    for change in changes:
        section, name = change.key.split(".")
        sections.setdefault(section, {})[name] = change.value
    changed = run.with_(**{name: getattr(run, name).with_(**values) for name, values in sections.items()})
    return Variant(changed, changes) if not changes or not check(changed) else None
