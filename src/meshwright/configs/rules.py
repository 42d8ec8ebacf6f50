"""Rules that say what one key of a config file means in a run, and their application to a file."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwright.configs.entries import Entry, Status, show_settings
from meshwright.spec.violations import nearest, show_value
from meshwright.spec.yaml_text import walk

Settings = dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """What a rule makes of one value."""

    status: Status
    settings: Settings = field(default_factory=dict[str, Any])
    """Dotted keys of a run and their values."""
    facts: Settings = field(default_factory=dict[str, Any])
    """Values that become settings only together with those of other keys, such as the number of ranks."""
    reason: str = ""


Rule = Callable[[Any], Outcome]


@dataclass(frozen=True)
class Format:
    """The table of one file format."""

    title: str
    rules: Mapping[str, Rule]
    """Dotted key -> rule; `section.*` is the rule of the keys of a section that have none of their own."""
    switches: Mapping[str, str] = field(default_factory=dict[str, str])
    """Section -> its key that switches it on; keys of a section that is off have no effect."""
    aliases: Mapping[str, str] = field(default_factory=dict[str, str])
    """Other spellings of keys."""


@dataclass
class Translation:
    """A file in the words of a run: settings, facts, and an entry for every key."""

    entries: list[Entry] = field(default_factory=list[Entry])
    settings: Settings = field(default_factory=dict[str, Any])
    facts: Settings = field(default_factory=dict[str, Any])

    def add(self, key: str, value: Any, outcome: Outcome) -> None:
        """Record what a key became; a setting that another key has set to another value is a refusal."""
        conflicts = [name for name, new in outcome.settings.items() if self.settings.get(name, new) != new]
        if conflicts:
            reason = f"another key has set {show_settings({k: self.settings[k] for k in conflicts})}"
            outcome = Outcome("refused", reason=reason)
        self.settings.update(outcome.settings)
        self.facts.update(outcome.facts)
        to = show_settings(outcome.settings)
        is_blocking = outcome.status == "refused"
        self.entries.append(Entry(key, value, outcome.status, to, outcome.reason, is_blocking))

    def extend(self, other: "Translation") -> None:
        """Add the translation of a file that this file names."""
        self.entries += other.entries
        self.settings.update(other.settings)
        self.facts.update(other.facts)


def translate(tree: Mapping[str, Any], table: Format) -> Translation:
    """Apply a table to a file; every key of the file gets an entry."""
    found = Translation()
    values = {_spelled(path, table): value for path, value in walk(tree)}
    for key, value in values.items():
        found.add(key, value, _outcome(key, value, values, table))
    return found


def _spelled(path: tuple[str | int, ...], table: Format) -> str:
    key = ".".join(map(str, path))
    return table.aliases.get(key, key)


def _outcome(key: str, value: Any, values: Mapping[str, Any], table: Format) -> Outcome:
    section = key.rpartition(".")[0]
    switch = f"{section}.{table.switches[section]}" if section in table.switches else key
    if switch != key and values.get(switch) in (False, None):
        return Outcome("mapped", reason=f"no effect: {switch} is off")
    if value == "auto":
        return Outcome("changed", reason="stays as the run has it: `auto` is filled in by the Trainer")
    rule = table.rules.get(key) or table.rules.get(f"{section}.*")
    if rule is None:
        return Outcome("refused", reason=_unknown(key, table))
    try:
        return rule(value)
    except (ValueError, TypeError, KeyError, IndexError):
        variable = "; write the value of the shell variable into the file" if "$" in str(value) else ""
        return Outcome("refused", reason=f"{show_value(value)} is not a value of this key{variable}")


def _unknown(key: str, table: Format) -> str:
    known = [name for name in (*table.rules, *table.aliases) if not name.endswith("*")]
    hint = nearest(key, known)
    return f"not a known key of {table.title}{f'; {hint}' if hint else ''}"


def same(key: str, read: Callable[[Any], Any] = lambda value: value, *, reason: str = "") -> Rule:
    """The value, as `read` returns it, is that of a key of the run."""
    return lambda value: Outcome("mapped", {key: read(value)}, reason=reason)


def changed(key: str, read: Callable[[Any], Any], reason: str) -> Rule:
    """Like `same`, for a key of the run that does not mean quite the same."""
    return lambda value: Outcome("changed", {key: read(value)}, reason=reason)


def fact(name: str, read: Callable[[Any], Any] = lambda value: value, *, reason: str) -> Rule:
    """The value counts together with those of other keys."""
    return lambda value: Outcome("mapped", facts={name: read(value)}, reason=reason)


def choice(outcomes: Mapping[Any, Outcome | Settings], otherwise: str = "") -> Rule:
    """One outcome per value (text without regard to case); a mapping alone is settings that mean the same."""
    table = {_plain(value): outcome for value, outcome in outcomes.items()}

    def rule(value: Any) -> Outcome:
        outcome = table.get(_plain(value))
        if outcome is None:
            allowed = ", ".join(str(each) for each in outcomes)
            return Outcome("refused", reason=otherwise or f"mapped are only {allowed}")
        return outcome if isinstance(outcome, Outcome) else Outcome("mapped", dict(outcome))

    return rule


def _plain(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def only(values: Iterable[Any], otherwise: str, *, status: Status = "refused") -> Rule:
    """These values mean what a run does anyway; others are refused, or changed, with the reason."""
    usual = [_plain(value) for value in values]

    def rule(value: Any) -> Outcome:
        is_usual = any(_plain(value) == each and type(value) is type(each) for each in usual)
        return Outcome("mapped") if is_usual else Outcome(status, reason=otherwise)

    return rule


def no_setting(reason: str) -> Rule:
    """Nothing to set: a run decides this in another way, or another verb does."""
    return lambda value: Outcome("changed", reason=reason)


def refuse(reason: str) -> Rule:
    """The run has no such thing."""
    return lambda value: Outcome("refused", reason=reason)


def off_or_refuse(reason: str) -> Rule:
    """False, null, none and empty values mean what a run does anyway; others are refused."""
    return only((False, None, "none", "no", "", 0), reason)


def off_or_changed(reason: str) -> Rule:
    """Like `off_or_refuse`, for values that another part of this program covers."""
    return only((False, None, "none", "no", "", 0), reason, status="changed")
