"""Settings that a run may change when it goes on, and those that its checkpoints fix.

A run that is started again in its directory may have other settings than before: more steps, another learning
rate, batch or dataset. Each difference is a `Change`. Those that the saved state contradicts are refused.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeGuard

from meshwright.spec.base import Spec
from meshwright.spec.violations import show_value

# Settings that name a run or its file format and decide nothing in it.
_UNRECORDED = ("name", "version")
_MODEL = "the saved weights are of the old model"
_INITIAL = "it is used before the first step only"
_FIXED: dict[str, str | None] = {
    "model": _MODEL,
    "adapter": "the saved adapters are of the old kind, rank or targets",
    "adapter.dropout": None,
    "adapter.start_from": _INITIAL,
    "train_only": "the saved state is of the parameters that were trained",
    "model.init_std": _INITIAL,
    "model.scaled_residual_init": _INITIAL,
    "seed": "the order of samples and the initial weights follow from it",
    "optim": "the saved optimizer state is of the old optimizer",
    "optim.kind": "the saved optimizer state is of the old kind",
    "checkpoint.start_from": _INITIAL,
    "checkpoint.new_tokens": _INITIAL,
}
# Settings of a model that decide how it is trained, not what its weights mean.
_MODEL_TRAINING = (
    "model.family",
    "model.dropout",
    "model.attention.dropout",
    "model.moe.aux_loss",
    "model.moe.balance_bias_rate",
    "model.moe.capacity_factor",
)
_MOMENTUM_KINDS = ("sgd", "lars", "adafactor")


class Change(NamedTuple):
    """A setting that differs from that of the saved run."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key} was {show_value(self.old)}, is {show_value(self.new)}"

    @property
    def is_of_data(self) -> bool:
        """Whether the stream of samples may be another one."""
        return self.key == "data" or self.key.startswith("data.")


def changed_settings(saved: Mapping[str, Any], run: Spec) -> list[Change]:
    """The settings of `run` that differ from those of a saved spec, sorted by key.

    The saved spec is validated again, so that a field added since, at its default, is no difference.
    """
    try:
        old = type(run).model_validate(saved).model_dump(mode="json")
    except ValueError:  # written by a version with other fields
        old = dict(saved)
    return list(_differences(old, run.model_dump(mode="json")))


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Iterator[Change]:
    for key in sorted({*old, *new}):
        name, a, b = f"{prefix}{key}", old.get(key), new.get(key)
        if _is_mapping(a) and _is_mapping(b):
            yield from _differences(a, b, f"{name}.")
        elif a != b and name not in _UNRECORDED:
            yield Change(name, a, b)


def refused_changes(changes: list[Change], run: Spec) -> list[tuple[Change, str]]:
    """The changes that the saved state contradicts, each with the reason."""
    known = _known_keys(run.model_dump(mode="json"))
    found = [(change, _reason(change, run, known)) for change in changes]
    return [(change, reason) for change, reason in found if reason]


def _reason(change: Change, run: Spec, known: set[str]) -> str | None:
    key = change.key
    if key not in known:
        return "this version has no such setting"
    if key in _MODEL_TRAINING or (key == "checkpoint.start_from" and change.new is None):
        return None
    if key == "checkpoint.start_from" and getattr(run, "adapter", None) is not None:
        return None  # the base of adapters may have moved; its digest is compared
    if key == "optim.beta1" and 0 in (change.old, change.new):
        kind = getattr(getattr(run, "optim", None), "kind", None)
        return f"{kind} keeps no momentum at 0" if kind in _MOMENTUM_KINDS else None
    if key.startswith("optim.") and key != "optim.kind":
        return None
    parents = [key[:end] for end, letter in enumerate(key) if letter == "."]
    return next((_FIXED[one] for one in (key, *reversed(parents)) if one in _FIXED), None)


def _known_keys(values: Mapping[str, Any], prefix: str = "") -> set[str]:
    """Every key of a spec and of the specs inside it."""
    found: set[str] = set()
    for key, value in values.items():
        found.add(f"{prefix}{key}")
        if _is_mapping(value):
            found |= _known_keys(value, f"{prefix}{key}.")
    return found


def _is_mapping(value: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)
