"""Kept tensors and peaks of a traced block, as sums of monomials of named dims.

A block has three sections that the table keeps apart: attention (norm, projections, rotary embedding,
output), the core between them (softmax(q k) v, masks, communication over cp) and the MLP.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from meshwright.plan.memory.block_table import SECTIONS
from meshwright.plan.memory.dims import (
    MONOMIALS,
    TOKEN_MONOMIALS,
    WEIGHT_MONOMIALS,
    Dims,
    dims_of,
    evaluate,
)
from meshwright.plan.workload.layouts import one_layout
from meshwright.rehearse.phases import WEIGHT_PASS
from meshwright.rehearse.trace import Trace
from meshwright.spec import RunSpec

Terms = dict[str, float]
"""Bytes for each monomial: a sum of products of dims."""
Live = dict[int, tuple[int, int]]
"""Bytes and phase of each live storage."""

SMALL_BYTES = 2**14
"""Tensors up to this size are left out: statistics and scales, which no layout's peak depends on."""
UNKNOWN_BYTES = 2**18
"""Tensors up to this size may be no product of the named dims."""
UNKNOWN_SCALE_BYTES = 2**22
"""The same with fp8, whose scales are padded."""
FACTORS = (1.0, 2.0, 4.0, 8.0, 16.0, 1 / 32, 1 / 16, 1 / 8)
FUSED = (
    *(("D*HK", "D*GK"), ("T*HK", "T*GK"), ("T*HN", "T*HP"), ("T*HK", "T*HP"), ("T*HP", "T*HK")),
    *(("t*C", "t*R"), ("D*C", "D*R"), ("C*HN", "C*HP")),
)
"""Products that one tensor often holds together: fused projections, keys beside values."""
MLP_WEIGHTS = {"D*F", "D*U", "EDM", "D*E"}
STATE_KINDS = ("weights", "optimizer", "batch", "gathered")
SECTION_OF = {"attention": "attention", "output": "attention", "core": "core", "mlp": "mlp"}
"""The section of each part that is a phase of its own."""


class Unknown(Exception):
    """A tensor is no product of the named dims."""


class Units:
    """Finds the monomials that the bytes of a traced tensor are."""

    def __init__(self, run: RunSpec) -> None:
        at = one_layout(
            run.parallel,
            run.memory,
            microbatch_sequences=run.data.microbatch_sequences,
            num_microbatches=run.accumulation,
        )
        self.dims: Dims = dims_of(run.model, run.data.sequence_length, at)
        names = _without_twins(run)
        self._sizes = {name: float(evaluate(name, self.dims)[0]) for name in names}
        self._sizes = {name: size for name, size in self._sizes.items() if size > 0}
        self._known: dict[int, Terms] = {}
        self._is_zero3 = run.parallel.zero == 3
        self._fused = (1.0,) if run.precision.fp8 is None else (1.0, 1 / 16, 1 / 32)
        self._unknown_bytes = UNKNOWN_BYTES if run.precision.fp8 is None else UNKNOWN_SCALE_BYTES
        self._has_bands = run.model.attention.window is not None and run.parallel.cp > 1

    def terms(self, num_bytes: int) -> Terms:
        """One product, or the sum of two as of a fused projection; nothing for small tensors."""
        if num_bytes <= SMALL_BYTES:
            return {}
        if num_bytes not in self._known:
            self._known[num_bytes] = self._find(num_bytes)
        return self._known[num_bytes]

    def _find(self, num_bytes: int) -> Terms:
        return (
            self._single(num_bytes, FACTORS[:4])
            or self._pair(num_bytes, [pair for pair in FUSED if set(pair) <= set(self._sizes)])
            or self._single(num_bytes, FACTORS[4:])
            or self._other(num_bytes)
        )

    def _single(self, num_bytes: int, factors: Sequence[float]) -> Terms:
        for factor, (name, size) in itertools.product(factors, self._sizes.items()):
            if _is(num_bytes, factor * size):
                return {name: factor}
        return {}

    def _pair(self, num_bytes: int, pairs: Iterable[tuple[str, str]]) -> Terms:
        for one, other in pairs:
            for each, left, right in itertools.product(self._fused, (1.0, 2.0, 4.0), (1.0, 2.0, 4.0, 8.0)):
                if _is(num_bytes, each * (left * self._sizes[one] + right * self._sizes[other])):
                    return {one: each * left, other: each * right}
        return {}

    def _other(self, num_bytes: int) -> Terms:
        # Parts of a fused tensor are of one class: both have rows of tokens, or both are weights.
        pairs = itertools.permutations(self._sizes, 2)
        found = self._pair(num_bytes, sorted(pairs, key=lambda pair: _class(pair[0]) != _class(pair[1])))
        if found:
            return found
        if self._is_zero3 or num_bytes <= self._unknown_bytes:
            return {}  # FSDP2's own buffers, which the planner counts by itself
        if self._has_bands:  # a window ends within a chunk of keys
            return {"w": num_bytes / self._sizes["w"]}
        raise Unknown(f"{num_bytes} bytes are no product of {sorted(self._sizes)}")


def _class(monomial: str) -> str:
    classes = {"tokens": TOKEN_MONOMIALS, "weights": WEIGHT_MONOMIALS}
    return next((name for name, listed in classes.items() if monomial in listed), "pairs")


def _without_twins(run: RunSpec) -> list[str]:
    """Monomials that can be told apart: with one sequence a mask of documents looks like one of positions."""
    twins: set[str] = set()
    if run.data.microbatch_sequences == 1:
        twins.add("S*S" if run.data.documents == "separate" else "B*S*S")
    if run.parallel.tp == 1:
        twins |= {name for name in TOKEN_MONOMIALS if name[0] == "T" and f"t{name[1:]}" in TOKEN_MONOMIALS}
    if run.parallel.cp == 1:
        twins |= {"cp*T*GK", "cp*T", "W", "w"}
    return [name for name in MONOMIALS if name not in twins]


def _is(num_bytes: int, size: float) -> bool:
    """Up to the allocator's rounding, and to that of rows to full experts."""
    return 0.999 * size <= num_bytes < 1.001 * size + 512


class Point(NamedTuple):
    """What stands at one point of a phase, beyond what stood when the pass over the block began."""

    live: dict[str, Terms]
    """Tensors of each section; those of none count for the section of the phase."""
    gradients: dict[str, Terms]
    """Gradients of weights of each section."""
    arriving: Terms
    """The gradient that has come just now."""


class Reading(NamedTuple):
    """One block of a trace; sums are by section."""

    kept: dict[str, Terms]
    """Saved for backward."""
    kept_casts: dict[str, Terms]
    remembered: dict[str, Terms]
    """Weights cast by autocast, which stay until the forward of the full model has ended."""
    points: dict[str, list[Point]]
    """By phase and part: forward/attention, forward/core, forward/output, forward/mlp; recompute/...;
    backward/mlp, backward/output, ...; of a split backward input/... and weight/..."""
    between: dict[str, Terms]
    """Held between the passes of a split backward."""
    leftover: dict[str, Terms]
    """Not freed by the weight pass itself, but with the graph: in the last stage after the step."""


class _Live:
    """The storages that exist while the events of a trace are read."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.now: Live = {}

    def read(self, index: int) -> None:
        event = self.trace.events[index]
        if event.num_bytes > 0:
            self.now[event.number] = (event.num_bytes, event.phase_id)
        else:
            self.now.pop(event.number, None)


def read_block(trace: Trace, units: Units) -> Reading:
    """The first of the two blocks."""
    live, events, phases = _Live(trace), trace.events, trace.phases
    parts = [phases[event.phase_id] for event in events]
    inside = [i for i, part in enumerate(parts) if _block(part.part) == 0 and part.microbatch == 0]
    forward = [i for i in inside if parts[i].kind == "forward"]
    backward = [i for i in inside if parts[i].kind == "backward"]
    second = next(i for i, part in enumerate(parts) if part.kind == "forward" and _block(part.part) == 1)
    turn = next(i for i, part in enumerate(parts) if part.kind == "backward")
    found = _Points(trace, units, block=0)
    at_second: Live = {}
    at_turn: Live = {}
    seen_mlp = False
    for index in range(len(events)):
        if index == second:
            at_second = dict(live.now)
        if index == turn:
            at_turn = dict(live.now)
        if index in (forward[0], backward[0]):
            found.begin = dict(live.now)
        live.read(index)
        if forward[0] <= index < second or backward[0] <= index <= backward[-1]:
            part = _part(parts[index].part)
            seen_mlp = seen_mlp or (parts[index].kind == "backward" and part == "mlp")
            is_recompute = parts[index].kind == "backward" and part != "mlp" and not seen_mlp
            found.add("recompute" if is_recompute else parts[index].kind, part, live.now, index)
    kept = {
        n: v for n, v in at_turn.items() if _block(phases[v[1]].part) == 0 and phases[v[1]].kind == "forward"
    }
    gone = {
        n: v for n, v in at_second.items() if n not in at_turn and trace.records[n].kind == "cast weights"
    }
    return Reading(
        kept=_by_section(trace, units, kept, lambda kind: kind is None or kind == "exchange"),
        kept_casts=_by_section(trace, units, kept, lambda kind: kind == "cast weights"),
        remembered=_by_section(trace, units, gone, lambda _: True),
        points=found.points,
        between={},
        leftover={},
    )


def read_split(trace: Trace, units: Units, block: int, reading: Reading) -> Reading:
    """The reading with what a block holds between its input and its weight pass, and the points of both."""
    live, phases = _Live(trace), trace.phases
    parts = [phases[event.phase_id] for event in trace.events]
    inputs = [i for i, part in enumerate(parts) if part.kind == "backward" and _block(part.part) == block]
    weights = [i for i, part in enumerate(parts) if part.part == WEIGHT_PASS and i > inputs[-1]]
    first = trace.events[weights[0]].phase_id
    end = next(i for i in range(weights[0], len(parts)) if trace.events[i].phase_id != first)
    found = _Points(trace, units, block)
    between: dict[str, Terms] = {}
    leftover: dict[str, Terms] = {}
    for index in range(end):
        if index in (inputs[0], weights[0]):
            found.begin = dict(live.now)
        if index == weights[0]:
            between = _held(trace, units, live.now, block, ("forward", "backward"))
        live.read(index)
        if index == end - 1:
            leftover = _held(trace, units, live.now, block, ("forward",))
        if inputs[0] <= index < weights[0]:
            found.add("input", _part(parts[index].part), live.now, index)
        elif index >= weights[0]:
            found.add("weight", "mlp", live.now, index)
    found.points |= _weight_points(found.points.pop("weight/mlp"))
    return reading._replace(between=between, leftover=leftover, points=reading.points | found.points)


def _weight_points(listed: list[Point]) -> dict[str, list[Point]]:
    """The weight pass goes from the first parameter to the last, so the attention's come first."""

    def is_mlp(point: Point) -> bool:
        return bool(point.gradients["mlp"] or MLP_WEIGHTS.intersection(point.live["mlp"]))

    first = [one for one in listed if not is_mlp(one)]
    moved = [
        one._replace(live={**one.live, "attention": _sum(one.live["attention"], one.live["mlp"]), "mlp": {}})
        for one in first
    ]
    return {"weight/attention": moved, "weight/mlp": [one for one in listed if is_mlp(one)]}


def _held(trace: Trace, units: Units, live: Live, block: int, kinds: tuple[str, ...]) -> dict[str, Terms]:
    """The block's tensors that passes of these kinds have made; its input gradient is one of them."""
    made = {number: trace.phases[phase_id] for number, (_, phase_id) in live.items()}
    mine = {n: v for n, v in live.items() if _block(made[n].part) == block and made[n].kind in kinds}
    return _by_section(trace, units, mine, lambda kind: kind is None or kind == "exchange")


def _block(part: str) -> int | None:
    name = part.split("/")[0]
    return int(name.removeprefix("blocks.")) if name.startswith("blocks.") else None


def _part(part: str) -> str:
    return part.partition("/")[2]


def _by_section(
    trace: Trace, units: Units, live: Live, wanted: Callable[[str | None], bool]
) -> dict[str, Terms]:
    found: dict[str, Terms] = {section: {} for section in SECTIONS}
    for number, (num_bytes, phase_id) in live.items():
        if wanted(trace.records[number].kind):
            section = SECTION_OF.get(_part(trace.phases[phase_id].part), "mlp")
            add(found[section], units.terms(num_bytes))
    return found


class _Points:
    """Collects the points of a block by phase and part."""

    def __init__(self, trace: Trace, units: Units, block: int) -> None:
        self.points: dict[str, list[Point]] = {}
        self.begin: Live = {}
        self._trace, self._units, self._block = trace, units, block

    def add(self, phase: str, part: str, now: Live, index: int) -> None:
        """A point after an allocation in a part of the block."""
        event = self._trace.events[index]
        if event.num_bytes > 0 and part:
            point = self._point(now, SECTION_OF[part], event.number)
            self.points.setdefault(f"{phase}/{part}", []).append(point)

    def _point(self, now: Live, section: str, latest: int) -> Point:
        live: dict[str, Terms] = {one: {} for one in SECTIONS}
        gradients: dict[str, Terms] = {one: {} for one in SECTIONS}
        arriving: Terms = {}
        come = {n: v for n, v in now.items() if n not in self.begin}
        gone = {n: v for n, v in self.begin.items() if n not in now}
        for sign, group in ((1.0, come), (-1.0, gone)):
            for number, (num_bytes, phase_id) in group.items():
                kind = self._trace.records[number].kind
                if kind in STATE_KINDS:
                    continue
                terms = self._units.terms(num_bytes)
                if kind == "gradients":
                    # A compiled block hands all its gradients over at its end.
                    its = "mlp" if MLP_WEIGHTS.intersection(terms) else "attention"
                    add(gradients[its], terms, sign)
                    if number == latest:
                        add(arriving, terms)
                    continue
                made = self._trace.phases[phase_id]
                is_mine = _block(made.part) == self._block
                add(live[SECTION_OF.get(_part(made.part), section) if is_mine else section], terms, sign)
        return Point(live, gradients, arriving)


def add(total: Terms, terms: Terms, sign: float = 1.0) -> None:
    """Add terms to a sum, in place."""
    for name, value in terms.items():
        total[name] = total.get(name, 0.0) + sign * value
        if not total[name]:
            del total[name]


def _sum(*parts: Terms) -> Terms:
    found: Terms = {}
    for part in parts:
        add(found, part)
    return found
