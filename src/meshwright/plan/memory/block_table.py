"""The kept tensors and peaks of one block of every kind, as `block_table.json` has them from the trace.

The file is written by `python -m meshwright.rehearse.block_table` and never by hand. It has sections of
blocks (attention, its core, MLP) by mode: compiled, recompute, weights, matmul format, tp. Here sections
become a block.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from itertools import product
from typing import Any, NamedTuple

Terms = Mapping[str, float]
"""Bytes for each monomial of dims.py: a sum of products."""
SECTIONS = ("attention", "core", "mlp")
FORWARD, BACKWARD = ("forward",), ("recompute", "backward")


class Mode(NamedTuple):
    """What changes both halves of a block."""

    compiled: bool
    recompute: str
    weights: str
    """`cast`: fp32, copied by autocast; `bf16`; `zero3`: gathered in bf16."""
    fp8: str
    """A recipe, or `bf16`."""
    tp: str
    """`1`, `tp` with one sequence, `tp_rows` with several: then collectives over tp copy their rows."""

    def __str__(self) -> str:
        return "/".join(
            ("compiled" if self.compiled else "eager", self.recompute, self.weights, self.fp8, self.tp)
        )


@dataclass(frozen=True)
class Point:
    """A candidate for the peak: what stands beyond what stood when the pass over the block began."""

    live: Terms
    gradients: Terms = field(default_factory=dict[str, float])
    """Of weights of this block that have come so far."""
    arriving: Terms = field(default_factory=dict[str, float])
    """The gradient that has come just now."""


@dataclass(frozen=True)
class Section:
    """The attention, its core or the MLP of a block."""

    kept: Terms
    casts: Terms
    """Kept copies of weights in the format of compute."""
    remembered: Terms
    """Copies of weights that autocast drops when the forward of the model ends."""
    points: Mapping[str, list[Point]]
    standing: Mapping[str, Point]
    """What this section leaves standing at the peak of a phase of another one."""
    arrivals: list[tuple[str, Point]] = field(default_factory=list)
    """Points of its backward at which the gradient of a matrix comes, in order, with their phases."""
    between: Terms = field(default_factory=dict[str, float])
    """Held between the input and the weight pass of a split backward."""
    leftover: Terms = field(default_factory=dict[str, float])
    """Not freed by the weight pass, but with the graph of the stage."""


@dataclass(frozen=True, eq=False)
class BlockMemory:
    """One block: what it keeps for backward, and the peak candidates of its forward and backward.

    `block_memory` returns the same object for the same block, so objects are compared by identity.
    """

    kept: Terms
    casts: Terms
    remembered: Terms
    forward: list[Point]
    backward: list[Point]
    arrivals: list[Point]
    """Points at which the gradient of a matrix comes, in order."""
    between: Terms
    """Held between the passes of a split backward: I makes input gradients, W weight gradients."""
    leftover: Terms
    """Held after both in the last stage, whose graph torch keeps until the step has ended."""
    input_pass: list[Point]
    weight_pass: list[Point]


def total(*parts: Terms, sign: float = 1.0) -> dict[str, float]:
    """The sum of terms; with sign=-1 the first minus the others."""
    found: dict[str, float] = dict(parts[0]) if parts else {}
    for part in parts[1:]:
        for name, value in part.items():
            found[name] = found.get(name, 0.0) + sign * value
    return {name: value for name, value in found.items() if value}


@cache
def _table() -> dict[str, Any]:
    file = resources.files("meshwright.plan.memory").joinpath("block_table.json")
    return json.loads(file.read_text(encoding="utf-8"))["modes"]


def parse_terms(text: str) -> Terms:
    """`t*D:6 T*HK:4` as a mapping."""
    return {name: float(value) for name, _, value in (part.partition(":") for part in text.split())}


def show_terms(terms: Terms) -> str:
    """The text of terms, sorted."""
    return " ".join(f"{name}:{value:g}" for name, value in sorted(terms.items()))


def _point(texts: list[str]) -> Point:
    return Point(*(parse_terms(text) for text in texts))


def section_of(phase: str) -> str:
    """The section that a phase such as `backward/output` belongs to."""
    part = phase.partition("/")[2]
    return "attention" if part == "output" else part


def core_mode(mode: Mode) -> Mode:
    """What of a mode changes the core of attention."""
    return Mode(mode.compiled, mode.recompute, "cast", "bf16", "1")


@cache
def _stored(mode: Mode, section: str, name: str) -> Section | None:
    found = _table().get(str(mode), {}).get(section, {}).get(name)
    if found is None or not found["points"]:
        return None
    return Section(
        *(parse_terms(found.get(part, "")) for part in ("kept", "casts", "remembered")),
        points={phase: [_point(one) for one in listed] for phase, listed in found["points"].items()},
        standing={phase: _point(one) for phase, one in found["standing"].items()},
        arrivals=[(f"backward/{part}", _point(one)) for part, *one in found.get("arrivals", [])],
        between=parse_terms(found.get("between", "")),
        leftover=parse_terms(found.get("leftover", "")),
    )


def _is_compiled(base: Mode, section: str, name: str) -> bool:
    """False where the table says that torch's compiler passes over a block with this section."""
    return _table().get(str(base), {}).get(section, {}).get(name, {}) is not None


def _nearest_modes(mode: Mode) -> list[Mode]:
    """Modes in which a section may have been traced instead, the nearest first."""
    tps = {"tp_rows": ("tp_rows", "tp", "1"), "tp": ("tp", "1")}.get(mode.tp, ("1",))
    formats = (mode.fp8,) if mode.fp8 == "bf16" else (mode.fp8, "current", "bf16")
    weights = {"bf16": ("bf16", "zero3", "cast"), "zero3": ("zero3", "bf16", "cast")}.get(
        mode.weights, ("cast",)
    )
    found = [
        Mode(mode.compiled, mode.recompute, kept, fp8, tp) for tp, fp8, kept in product(tps, formats, weights)
    ]
    return list(dict.fromkeys(found))


PLAIN = {"attention": "gqa", "core": "plain", "mlp": "swiglu"}
NEAREST_MLP = {"routed_shared_ep": "routed_ep", "routed_shared": "routed"}


def _reference(mode: Mode, other: Mode, section: str, name: str) -> str:
    """The kind whose change from one mode to another stands for that of `name`."""
    nearest = NEAREST_MLP.get(name, "")
    is_stored = _stored(mode, section, nearest) and _stored(other, section, nearest)
    return nearest if is_stored else PLAIN[section]


@cache
def find_section(mode: Mode, section: str, name: str) -> Section:
    """A section of this kind; one that was not traced in this mode is moved there from another."""
    exact = _stored(mode, section, name)
    if exact is not None:
        return exact
    if mode.compiled and mode.recompute == "full" and mode.tp != "1":
        return _recomputed(find_section(mode._replace(recompute="none"), section, name), section)
    base = mode._replace(weights="cast", tp="1")
    if mode.fp8 not in ("bf16", "current") and mode != base and _stored(base, section, name):
        # Recipes differ in what fp8 linears keep, which neither tp nor ZeRO changes.
        known, other = (find_section(one._replace(fp8="current"), section, name) for one in (mode, base))
        return _shifted(find_section(base, section, name), known, other)
    if name == PLAIN[section]:
        return next(found for one in _nearest_modes(mode) if (found := _stored(one, section, name)))
    for one in _nearest_modes(mode):
        found = _stored(one, section, name)
        if found is not None:
            known = _reference(mode, one, section, name)
            return _shifted(found, find_section(mode, section, known), find_section(one, section, known))
    raise KeyError(f"no {section} {name} in {mode}")


def _recomputed(kept: Section, section: str) -> Section:
    """Full recompute of a section that was traced without: its backward begins with what it would have kept.

    For blocks that torch's compiler cannot follow on a machine without devices.
    """
    left: Terms = {"t*D": 2.0} if section == "mlp" else {}
    regained = total(total(kept.kept, kept.casts), left, sign=-1.0)

    def later(phase: str, point: Point) -> Point:
        if phase.startswith("forward"):
            return point
        return Point(total(point.live, regained), point.gradients, point.arriving)

    phases = {f"backward/{part}" for part in ("attention", "core", "output", "mlp")}
    standing = {phase: kept.standing.get(phase, Point({})) for phase in {*kept.standing, *phases}}
    return Section(
        left,
        {},
        {},
        {phase: [later(phase, one) for one in listed] for phase, listed in kept.points.items()},
        {phase: later(phase, one) for phase, one in standing.items() if section_of(phase) != section},
        [(phase, later(phase, one)) for phase, one in kept.arrivals],
    )


def _shifted(found: Section, plain: Section, reference: Section) -> Section:
    """A section of another mode, moved by what this mode changes of the plain one."""

    def moved(name: str) -> Terms:
        return total(getattr(found, name), total(getattr(plain, name), getattr(reference, name), sign=-1.0))

    def shift(phase: str, point: Point) -> Point:
        new, old = _largest(plain, phase), _largest(reference, phase)
        return Point(total(point.live, total(new.live, old.live, sign=-1.0)), point.gradients, point.arriving)

    has_casts = bool(plain.casts or plain.remembered)
    phases = {*found.standing, *plain.standing, *reference.standing}
    return Section(
        moved("kept"),
        moved("casts") if has_casts else {},
        moved("remembered") if has_casts else {},
        {phase: [shift(phase, one) for one in listed] for phase, listed in found.points.items()},
        {phase: shift(phase, found.standing.get(phase, Point({}))) for phase in phases},
        found.arrivals,
        moved("between"),
        moved("leftover"),
    )


def _largest(section: Section, phase: str) -> Point:
    """The first of the points of a phase: they are stored from the largest on."""
    if phase in section.standing:
        return section.standing[phase]
    return next(iter(section.points.get(phase, [])), Point({}))


@cache
def block_memory(mode: Mode, attention: str, core: str, mlp: str) -> BlockMemory:
    """The block of three sections."""
    base = core_mode(mode)
    if mode.compiled and not (_is_compiled(base, "core", core) and _is_compiled(base, "mlp", mlp)):
        return block_memory(mode._replace(compiled=False), attention, core, mlp)
    parts = {
        "attention": find_section(mode, "attention", attention),
        "core": _find_core(base, attention, core),
        "mlp": find_section(mode, "mlp", mlp),
    }
    listed = list(parts.values())
    return BlockMemory(
        total(*(one.kept for one in listed)),
        total(*(one.casts for one in listed)),
        total(*(one.remembered for one in listed)),
        forward=_together(parts, FORWARD),
        backward=_together(parts, BACKWARD),
        arrivals=[
            _beside(parts, phase, point)
            for section in ("mlp", "attention")
            for phase, point in parts[section].arrivals
        ],
        between=total(*(one.between for one in listed)),
        leftover=total(*(one.leftover for one in listed)),
        input_pass=_together(parts, ("input",)),
        weight_pass=_together(parts, ("weight",)),
    )


def _find_core(base: Mode, attention: str, core: str) -> Section:
    name = f"latent_{core}" if attention == "latent" else core
    if base.compiled and _stored(base, "core", name) is None:
        base = base._replace(compiled=False)
    return find_section(base, "core", name)


def _together(parts: Mapping[str, Section], phases: tuple[str, ...]) -> list[Point]:
    return [
        _beside(parts, phase, point)
        for section in parts.values()
        for phase, points in section.points.items()
        if phase.partition("/")[0] in phases
        for point in points
    ]


def _beside(parts: Mapping[str, Section], phase: str, point: Point) -> Point:
    """A point of one section with what the others leave standing there."""
    others = [one.standing[phase] for one in parts.values() if phase in one.standing]
    live = total(point.live, *(one.live for one in others))
    return Point(live, total(point.gradients, *(one.gradients for one in others)), point.arriving)
