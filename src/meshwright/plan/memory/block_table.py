"""The kept tensors and peaks of one block of every kind, as `block_table.json` has them from the trace.

The file is written by `python -m meshwright.rehearse.block_table` and never by hand. It has halves of
blocks (attention, MLP) by mode: compiled, recompute, weights, matmul format, tp. Here two halves become one.
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
FORWARD = ("forward/attention", "forward/mlp")
BACKWARD = ("recompute/attention", "backward/mlp", "backward/attention")


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
class Half:
    """The attention or the MLP of a block."""

    kept: Terms
    casts: Terms
    """Kept copies of weights in the format of compute."""
    remembered: Terms
    """Copies of weights that autocast drops when the forward of the model ends."""
    points: Mapping[str, list[Point]]
    standing: Mapping[str, Point]
    """What this half leaves standing at the peak of a phase of the other half."""
    arrivals: list[Point] = field(default_factory=list)
    """Points of its backward at which the gradient of a matrix comes, in order."""


@dataclass(frozen=True)
class BlockMemory:
    """One block: what it keeps for backward, and the peak candidates of its forward and backward."""

    kept: Terms
    casts: Terms
    remembered: Terms
    forward: list[Point]
    backward: list[Point]
    arrivals: list[Point]
    """Points at which the gradient of a matrix comes, in order."""


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


@cache
def _stored(mode: Mode, half: str, name: str) -> Half | None:
    found = _table().get(str(mode), {}).get(half, {}).get(name)
    if found is None or not found["points"]:
        return None
    return Half(
        *(parse_terms(found.get(part, "")) for part in ("kept", "casts", "remembered")),
        points={phase: [_point(one) for one in listed] for phase, listed in found["points"].items()},
        standing={phase: _point(one) for phase, one in found["standing"].items()},
        arrivals=[_point(one) for one in found.get("arrivals", [])],
    )


def _nearest_modes(mode: Mode) -> list[Mode]:
    """Modes in which a half may have been traced instead, the nearest first; an uncompiled one last."""
    tps = {"tp_rows": ("tp_rows", "tp", "1"), "tp": ("tp", "1")}.get(mode.tp, ("1",))
    formats = (mode.fp8,) if mode.fp8 == "bf16" else (mode.fp8, "current", "bf16")
    weights = {"bf16": ("bf16", "zero3", "cast"), "zero3": ("zero3", "bf16", "cast")}.get(
        mode.weights, ("cast",)
    )
    found = [
        Mode(compiled, mode.recompute, kept, fp8, tp)
        for compiled, tp, fp8, kept in product(
            (True, False) if mode.compiled else (False,), tps, formats, weights
        )
    ]
    return list(dict.fromkeys(found))


PLAIN = {"attention": "gqa", "mlp": "swiglu"}
NEAREST_MLP = {"routed_shared_ep": "routed_ep", "routed_shared": "routed"}


def _reference(mode: Mode, other: Mode, half: str, name: str) -> str:
    """The half whose change from one mode to another stands for that of `name`."""
    nearest = NEAREST_MLP.get(name, "")
    is_stored = _stored(mode, half, nearest) and _stored(other, half, nearest)
    return nearest if is_stored else PLAIN[half]


@cache
def half_of(mode: Mode, half: str, name: str) -> Half:
    """A half of this kind; where it was not traced in this mode, what it adds to the plain one in another."""
    exact = _stored(mode, half, name)
    if exact is not None:
        return exact
    if mode.compiled and mode.recompute == "full" and mode.tp != "1":
        return _recomputed(half_of(mode._replace(recompute="none"), half, name), half)
    if name == PLAIN[half]:
        return next(found for one in _nearest_modes(mode) if (found := _stored(one, half, name)))
    for one in _nearest_modes(mode):
        found = _stored(one, half, name)
        if found is not None:
            base = _reference(mode, one, half, name)
            return _shifted(found, half_of(mode, half, base), half_of(one, half, base))
    raise KeyError(f"no {half} {name} in {mode}")


def _recomputed(kept: Half, half: str) -> Half:
    """Full recompute of a half that was traced without: its backward begins with what it would have kept.

    For blocks that torch's compiler cannot follow on a machine without devices.
    """
    left: Terms = {"t*D": 2.0} if half == "mlp" else {}
    regained = total(total(kept.kept, kept.casts), left, sign=-1.0)

    def later(phase: str, point: Point) -> Point:
        if phase.startswith("forward"):
            return point
        return Point(total(point.live, regained), point.gradients, point.arriving)

    return Half(
        left,
        {},
        {},
        {phase: [later(phase, one) for one in listed] for phase, listed in kept.points.items()},
        {phase: later(phase, one) for phase, one in kept.standing.items()},
        [later("backward", one) for one in kept.arrivals],
    )


def _shifted(found: Half, plain: Half, reference: Half) -> Half:
    """A half of another mode, moved by what this mode changes of the plain half."""

    def moved(name: str) -> Terms:
        return total(getattr(found, name), total(getattr(plain, name), getattr(reference, name), sign=-1.0))

    def shift(phase: str, point: Point) -> Point:
        new, old = _largest(plain, phase), _largest(reference, phase)
        return Point(total(point.live, total(new.live, old.live, sign=-1.0)), point.gradients, point.arriving)

    has_casts = bool(plain.casts or plain.remembered)
    return Half(
        moved("kept"),
        moved("casts") if has_casts else {},
        moved("remembered") if has_casts else {},
        {phase: [shift(phase, one) for one in listed] for phase, listed in found.points.items()},
        {phase: shift(phase, one) for phase, one in found.standing.items()},
        found.arrivals,
    )


def _largest(half: Half, phase: str) -> Point:
    """The first of the points of a phase: they are stored from the largest on."""
    if phase in half.standing:
        return half.standing[phase]
    return next(iter(half.points.get(phase, [])), Point({}))


@cache
def block_memory(mode: Mode, attention: tuple[str, ...], mlp: str) -> BlockMemory:
    """The block of two halves; several words of attention (`documents`, `ring`) add up."""
    first = half_of(mode, "attention", attention[0] if attention else "gqa")
    for other in attention[1:]:
        first = _shifted(first, half_of(mode, "attention", other), half_of(mode, "attention", "gqa"))
    second = half_of(mode, "mlp", mlp)
    return BlockMemory(
        total(first.kept, second.kept),
        total(first.casts, second.casts),
        total(first.remembered, second.remembered),
        forward=_together(first, second, FORWARD),
        backward=_together(first, second, BACKWARD),
        arrivals=[
            *(_beside(one, first.standing.get("backward/mlp")) for one in second.arrivals),
            *(_beside(one, second.standing.get("backward/attention")) for one in first.arrivals),
        ],
    )


def _together(attention: Half, mlp: Half, phases: tuple[str, ...]) -> list[Point]:
    found: list[Point] = []
    for phase in phases:
        own, other = (attention, mlp) if phase.endswith("attention") else (mlp, attention)
        found += [_beside(one, other.standing.get(phase)) for one in own.points.get(phase, [])]
    return found


def _beside(point: Point, standing: Point | None) -> Point:
    if standing is None:
        return point
    return Point(total(point.live, standing.live), total(point.gradients, standing.gradients), point.arriving)
