"""A run as the config file of another framework, with an entry for every value of the run that is set."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from meshwright.configs.entries import LAYOUT_SECTIONS, Entry, Status
from meshwright.spec.base import Spec
from meshwright.spec.run import RunSpec
from meshwright.spec.violations import spec_of
from meshwright.spec.yaml_text import walk


@dataclass(frozen=True)
class Written:
    """What a value of a run becomes in a file."""

    status: Status = "mapped"
    values: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Dotted keys of the file and their values."""
    reason: str = ""


Writer = Callable[[Any, RunSpec], Written]


@dataclass(frozen=True)
class Target:
    """A format that runs are written in."""

    title: str
    writers: Mapping[str, Writer]
    """Dotted key of a run -> what it becomes."""
    reasons: Mapping[str, str]
    """Section of a run -> why its other keys are not in such a file."""


@dataclass(frozen=True)
class Exported:
    """A config file as nested mappings, and an entry for every value of the run that has one."""

    document: dict[str, Any]
    entries: tuple[Entry, ...]


def export_run(run: RunSpec, target: Target) -> Exported:
    """The run in a target's words. A key of the layout that the target cannot say blocks the export."""
    document: dict[str, Any] = {}
    entries: list[Entry] = []
    for key, value in set_values(run, target.writers).items():
        writer = target.writers.get(key)
        written = writer(value, run) if writer else _not_written(key, target)
        for name, content in written.values.items():
            _put(document, name, content)
        if written.status != "mapped" or written.values or written.reason:
            entries.append(_entry(key, value, written))
    return Exported(document, tuple(entries))


def set_values(run: RunSpec, always: Mapping[str, Any]) -> dict[str, Any]:
    """Values that differ from the defaults, and those of the keys in `always`; the model is one value."""
    defaults = _defaults(RunSpec)
    tree = {**run.model_dump(mode="json"), "model": run.model.family}
    values = {".".join(map(str, path)): value for path, value in walk(tree)}
    return {
        key: value
        for key, value in values.items()
        if key in always or (key not in ("version", "name") and value != defaults.get(key, ...))
    }


def _defaults(spec: type[Spec], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> default, for all fields that have one; those of optional specs as if they were set."""
    found: dict[str, Any] = {}
    for name, info in spec.model_fields.items():
        below, key = spec_of(info), f"{prefix}{name}"
        if not info.is_required():
            default: Any = info.default
            found[key] = list(cast(tuple[Any, ...], default)) if isinstance(default, tuple) else default
        if below is not None:
            found.update(_defaults(below, f"{key}."))
    return found


def _not_written(key: str, target: Target) -> Written:
    section = key.partition(".")[0]
    reason = target.reasons.get(section, f"{target.title} has no such key")
    return Written("refused", reason=reason)


def _entry(key: str, value: Any, written: Written) -> Entry:
    to = ", ".join(f"{name}={content}" for name, content in written.values.items())
    is_blocking = written.status == "refused" and key.partition(".")[0] in LAYOUT_SECTIONS
    return Entry(key, value, written.status, to, written.reason, is_blocking)


def _put(document: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, name = dotted.split(".")
    for parent in parents:
        document = document.setdefault(parent, {})
    document[name] = value


def write_as(name: str, read: Callable[[Any], Any] = lambda value: value, *, reason: str = "") -> Writer:
    """The value under another name."""
    return lambda value, _: Written(values={name: read(value)}, reason=reason)


def unless(default: Any, writer: Writer) -> Writer:
    """Nothing for the default value, which such a file does not mention."""
    return lambda value, run: Written() if value == default else writer(value, run)


def cannot(default: Any, reason: str) -> Writer:
    """Other values than the default are refused."""
    return lambda value, _: Written() if value == default else Written("refused", reason=reason)


def differs(default: Any, reason: str) -> Writer:
    """Other values than the default have no counterpart, and the result of training is the same without."""
    return lambda value, _: Written() if value == default else Written("changed", reason=reason)
