"""Kept tensors and peaks of a traced block, as sums of monomials of named dims."""

import itertools
from typing import NamedTuple

from meshwright.plan.memory.dims import MONOMIALS, TOKEN_MONOMIALS, Dims, dims_of, evaluate
from meshwright.plan.workload.layouts import one_layout
from meshwright.rehearse.trace import Trace
from meshwright.spec import RunSpec

Terms = dict[str, float]
"""Bytes for each monomial: a sum of products of dims."""

SMALL_BYTES = 2**14
"""Tensors up to this size are left out: statistics and scales, which no layout's peak depends on."""
UNKNOWN_BYTES = 2**18
"""Tensors up to this size may be no product of the named dims."""
FACTORS = (1.0, 2.0, 4.0, 8.0, 16.0, 1 / 32, 1 / 16)
MLP_WEIGHTS = {"D*F", "D*U", "EDM", "D*E"}
STATE_KINDS = ("weights", "optimizer", "batch")


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

    def terms(self, num_bytes: int) -> Terms:
        """One product, or the sum of two as of a fused projection; nothing for small tensors."""
        if num_bytes <= SMALL_BYTES:
            return {}
        if num_bytes not in self._known:
            self._known[num_bytes] = self._find(num_bytes)
        return self._known[num_bytes]

    def _find(self, num_bytes: int) -> Terms:
        for factor, (name, size) in itertools.product(FACTORS, self._sizes.items()):
            if _is(num_bytes, factor * size):
                return {name: factor}
        for one, other in itertools.product(self._sizes.items(), repeat=2):
            for left, right in itertools.product((1.0, 2.0, 4.0), (1.0, 2.0, 4.0, 8.0)):
                if one[0] != other[0] and _is(num_bytes, left * one[1] + right * other[1]):
                    return {one[0]: left, other[0]: right}
        if self._is_zero3 or num_bytes <= UNKNOWN_BYTES:
            return {}  # FSDP2's own buffers, which the planner counts by itself
        raise Unknown(f"{num_bytes} bytes are no product of {sorted(self._sizes)}")


def _without_twins(run: RunSpec) -> list[str]:
    """Monomials that can be told apart: with one sequence a mask of documents looks like one of positions."""
    twins: set[str] = set()
    if run.data.microbatch_sequences == 1:
        twins.add("S*S" if run.data.documents == "separate" else "B*S*S")
    if run.parallel.tp == 1:
        twins |= {name for name in TOKEN_MONOMIALS if name[0] == "T" and f"t{name[1:]}" in TOKEN_MONOMIALS}
    if run.parallel.cp == 1:
        twins |= {"cp*T*GK", "cp*T", "W"}
    return [name for name in MONOMIALS if name not in twins]


def _is(num_bytes: int, size: float) -> bool:
    """Up to the allocator's rounding, and to that of rows to whole experts."""
    return 0.999 * size <= num_bytes < 1.001 * size + 512


class Point(NamedTuple):
    """What stands at one point of a half's forward or backward, beyond what stood when the block began."""

    own: Terms
    """Tensors of this half, and of neither."""
    other: Terms
    """Tensors of the other half."""
    own_gradients: Terms
    other_gradients: Terms
    arriving: Terms
    """The gradient that has come just now, of `own_gradients`."""


class Reading(NamedTuple):
    """One block of a trace, by half: `attention`, `mlp`."""

    kept: dict[str, Terms]
    """Saved for backward."""
    kept_casts: dict[str, Terms]
    remembered: dict[str, Terms]
    """Weights cast by autocast, which stay until the forward of the whole model has ended."""
    points: dict[str, list[Point]]
    """By phase: forward/attention, forward/mlp, recompute/attention, backward/mlp, backward/attention."""


class _Live:
    """The storages that exist while the events of a trace are read."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.now: dict[int, tuple[int, int]] = {}

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
    points: dict[str, list[Point]] = {}
    at_second: dict[int, tuple[int, int]] = {}
    at_turn: dict[int, tuple[int, int]] = {}
    begin: dict[int, tuple[int, int]] = {}
    seen_mlp = False
    for index in range(len(events)):
        if index == second:
            at_second = dict(live.now)
        if index == turn:
            at_turn = dict(live.now)
        if index in (forward[0], backward[0]):
            begin = dict(live.now)
        live.read(index)
        if forward[0] <= index < second or backward[0] <= index <= backward[-1]:
            half = _half(parts[index].part)
            seen_mlp = seen_mlp or (parts[index].kind == "backward" and half == "mlp")
            phase = parts[index].kind
            if phase == "backward" and half == "attention" and not seen_mlp:
                phase = "recompute"
            if events[index].num_bytes > 0 and half:
                point = _point(trace, units, live.now, begin, half, events[index].number)
                points.setdefault(f"{phase}/{half}", []).append(point)
    kept = {
        n: v for n, v in at_turn.items() if _block(phases[v[1]].part) == 0 and phases[v[1]].kind == "forward"
    }
    gone = {
        n: v for n, v in at_second.items() if n not in at_turn and trace.records[n].kind == "cast weights"
    }
    return Reading(
        kept=_by_half(trace, units, kept, lambda kind: kind is None or kind == "exchange"),
        kept_casts=_by_half(trace, units, kept, lambda kind: kind == "cast weights"),
        remembered=_by_half(trace, units, gone, lambda kind: True),
        points=points,
    )


def _block(part: str) -> int | None:
    name = part.split("/")[0]
    return int(name.removeprefix("blocks.")) if name.startswith("blocks.") else None


def _half(part: str) -> str:
    return part.partition("/")[2]


def _by_half(trace: Trace, units: Units, live: dict[int, tuple[int, int]], wanted) -> dict[str, Terms]:
    found: dict[str, Terms] = {"attention": {}, "mlp": {}}
    for number, (num_bytes, phase_id) in live.items():
        if wanted(trace.records[number].kind):
            half = _half(trace.phases[phase_id].part) or "mlp"
            add(found[half], units.terms(num_bytes))
    return found


def _point(trace, units, now, begin, half, latest) -> Point:
    own: Terms = {}
    other: Terms = {}
    own_gradients: Terms = {}
    other_gradients: Terms = {}
    arriving: Terms = {}
    come = {n: v for n, v in now.items() if n not in begin}
    gone = {n: v for n, v in begin.items() if n not in now}
    for sign, group in ((1.0, come), (-1.0, gone)):
        for number, (num_bytes, phase_id) in group.items():
            kind = trace.records[number].kind
            if kind in STATE_KINDS or (kind == "gathered"):
                continue
            made = trace.phases[phase_id]
            its = _half(made.part) if _block(made.part) == 0 else half
            is_own = its in ("", half)
            if kind == "gradients":
                # A compiled block hands all its gradients over at its end.
                terms = units.terms(num_bytes)
                is_own = ("mlp" if MLP_WEIGHTS.intersection(terms) else "attention") == half
                add(own_gradients if is_own else other_gradients, terms, sign)
                if number == latest:
                    add(arriving, units.terms(num_bytes))
                continue
            add(own if is_own else other, units.terms(num_bytes), sign)
    return Point(own, other, own_gradients, other_gradients, arriving)


def add(total: Terms, terms: Terms, sign: float = 1.0) -> None:
    """Add terms to a sum, in place."""
    for name, value in terms.items():
        total[name] = total.get(name, 0.0) + sign * value
        if not total[name]:
            del total[name]
