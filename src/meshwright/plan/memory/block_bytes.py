"""Bytes of one block of every layout: the table's sums of monomials, evaluated for many layouts at once."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from meshwright.plan.framework import Framework
from meshwright.plan.memory.block_table import BlockMemory, Mode, Point, Terms, block_memory
from meshwright.plan.memory.buckets import ARRIVAL
from meshwright.plan.memory.dims import MONOMIALS, WEIGHT_MONOMIALS, dims_of, evaluate
from meshwright.plan.workload.layouts import CP_KINDS, FULL, NORMS, Floats, Layouts
from meshwright.plan.workload.workload import Workload

Items = dict[str, Floats]
Rows = NDArray[np.intp]
"""Indices of some of the layouts."""
Turn = Literal["first", "later", "last"]
"""Of the backwards of a step: the first finds no gradients, the last reduces them."""
TURNS: tuple[Turn, ...] = ("first", "later", "last")
_SPLIT_NAMES = ("between", "leftover", "input", "new weight", "weight")
MATRICES = {
    "D*F": ("down", "up", "gate"),
    "D*U": ("down", "up", "gate"),
    "EDM": ("experts.down", "experts.up", "experts.gate"),
    "D*HK": ("output", "query"),
    "D*GK": ("value", "key"),
}
"""Matrices of each size, in the order in which backward finds their gradients."""


_COLUMN_OF = {name: index for index, name in enumerate(MONOMIALS)}


class Factors:
    """The sums of one block as matrices: a row for each sum, a column for each of MONOMIALS."""

    def __init__(self, block: BlockMemory, *, compiled: bool) -> None:
        self.kept, self.casts, self.remembered = (
            _matrix([part]) for part in (block.kept, block.casts, block.remembered)
        )
        self.forward = _matrix([one.live for one in block.forward])
        self.live = _matrix([one.live for one in block.backward])
        """The points of a backward."""
        self.gradients = _matrix([one.gradients for one in block.backward])
        self.live_if_fused = _matrix([_without_gradients(one.live) for one in block.backward])
        self.arriving = _matrix([one.arriving for one in block.backward])
        arrivals = _arrivals(block, compiled=compiled)
        self.arrival_names = tuple(arrivals)
        self.arrival_live = _matrix([one.live for one in arrivals.values()])
        self.arrival_gradients = _matrix([one.gradients for one in arrivals.values()])
        self.splits = bool(block.between)
        self.between, self.leftover = _matrix([block.between]), _matrix([block.leftover])
        self.input_pass = _matrix([one.live for one in block.input_pass])
        self.weight_pass, self.weight_gradients, self.weight_arriving = (
            _matrix([getattr(one, name) for one in block.weight_pass])
            for name in ("live", "gradients", "arriving")
        )


@cache
def _factors(block: BlockMemory, *, compiled: bool) -> Factors:
    return Factors(block, compiled=compiled)


def _matrix(sums: list[Terms]) -> Floats:
    found = np.zeros((max(1, len(sums)), len(MONOMIALS)))
    for row, terms in enumerate(sums):
        for name, factor in terms.items():
            found[row, _COLUMN_OF[name]] = factor
    return found


def _arrivals(block: BlockMemory, *, compiled: bool) -> dict[str, Point]:
    """The point at which the gradient of each matrix comes."""
    found: dict[str, Point] = {}
    counts: dict[str, int] = {}
    for one in block.arrivals:
        for monomial in one.arriving:
            names, index = MATRICES.get(monomial, ()), counts.get(monomial, 0)
            counts[monomial] = index + 1
            if index < len(names):
                # A compiled block hands all gradients over at its end.
                found[names[index]] = block.arrivals[-1] if compiled else one
    return found


@dataclass(frozen=True)
class Reduction:
    """How the gradients of a block meet earlier ones; every array has shape (M,)."""

    accumulates: NDArray[np.bool_]
    """Gradients are there already: new ones are added to them and freed."""
    fused: NDArray[np.bool_]
    """Compiled matmuls add to them in place (weight-gradient accumulation fusion)."""
    buckets: Floats
    """Bytes of the bucket that the gradient of each matrix of ARRIVAL completes, as it is launched;
    shape (len(ARRIVAL), M)."""

    def take(self, rows: Rows) -> "Reduction":
        """That of some of the layouts."""
        return Reduction(self.accumulates[rows], self.fused[rows], self.buckets[:, rows])


@dataclass(frozen=True)
class BackwardPoints:
    """Candidates for the peak of a block's backward, of shape (P, M), whatever is done with gradients."""

    live: Floats
    gradients: Floats
    """Gradients of the block's weights so far."""
    live_if_fused: Floats | None
    """Compiled blocks: without the gradients, which are added in place."""
    arriving: Floats | None
    """Uncompiled blocks: the gradient that has come just now."""
    arrival_names: tuple[str, ...]
    """The matrices of the block."""
    arrival_live: Floats
    """Live bytes at the arrival of each matrix's gradient."""
    arrival_gradients: Floats
    """Gradients so far at the same points."""

    def peak(self, reduction: Reduction) -> Items:
        """Items of the fullest point."""
        live, gradients = self.live, self.gradients
        if self.live_if_fused is not None:
            live = np.where(reduction.fused, self.live_if_fused, live)
            gradients = np.where(reduction.fused, 0.0, gradients)
        elif self.arriving is not None:
            gradients = np.where(reduction.accumulates, self.arriving, gradients)
        best = (live + gradients).argmax(axis=0)
        columns = np.arange(len(best))
        live, gradients = live[best, columns], gradients[best, columns]
        # What is added to earlier gradients is freed with it.
        passing = np.where(reduction.accumulates, gradients, 0.0)
        found = {"working set": live + passing, "gradients": gradients - passing}
        return self._with_launches({**found, "gathered": np.zeros(len(columns))}, reduction)

    def _with_launches(self, found: Items, reduction: Reduction) -> Items:
        """The same, or a bucket that is launched within the block where that is fuller."""
        if not self.arrival_names or not reduction.buckets.any():
            return found
        bucket = reduction.buckets[[ARRIVAL.index(name) for name in self.arrival_names]]
        made = np.where(reduction.accumulates, 0.0, self.arrival_gradients)
        total = np.where(bucket > 0, self.arrival_live + made + bucket, -np.inf)
        best = total.argmax(axis=0)
        columns = np.arange(len(best))
        better = total[best, columns] > sum(found.values())
        new = {"working set": self.arrival_live, "gradients": made, "gathered": bucket}
        return {item: np.where(better, new[item][best, columns], values) for item, values in found.items()}


class BlockBytes:
    """What the blocks of M layouts keep and hold at their peaks; every array has shape (M,)."""

    def __init__(self, work: Workload, at: Layouts, stack: Framework) -> None:
        self._work, self._at, self._stack = work, at, stack
        dims = dims_of(work.model, work.sequence_length, at)
        monomials = np.stack([evaluate(name, dims) for name in MONOMIALS])
        self._groups = [
            (
                rows,
                monomials[:, rows],
                [(_factors(one, compiled=work.compiled), share) for one, share in blocks],
            )
            for rows, blocks in _groups(work, at, stack)
        ]

    @cached_property
    def kept(self) -> Floats:
        """Bytes that a block keeps of one micro-batch for its backward."""
        return self._mean("kept")

    @cached_property
    def casts(self) -> Floats:
        """Bytes of kept copies of weights in the format of compute."""
        return self._mean("casts")

    @cached_property
    def remembered(self) -> Floats:
        """Bytes of copies of weights that autocast drops when the forward of the model ends."""
        return self._mean("remembered")

    @cached_property
    def _backward_points(self) -> list[list[BackwardPoints]]:
        """The candidates of each block of each group of layouts."""
        return [[self._points(one, columns) for one, _ in blocks] for _, columns, blocks in self._groups]

    def split(self) -> Items:
        """Peaks of a split backward, and what a block holds between its passes."""
        found = {name: np.zeros(len(self._at)) for name in _SPLIT_NAMES}
        each = self._stack.state.gradient / 4.0
        for rows, columns, blocks in self._groups:
            if (self._at.pp[rows] == 1).all() or not blocks[0][0].splits:
                continue
            for name in ("between", "leftover"):
                found[name][rows] = sum(share * (getattr(one, name) @ columns)[0] for one, share in blocks)
            for one, _ in blocks:
                live = one.weight_pass @ columns
                new = live + each * (one.weight_gradients @ columns)
                later = live + each * (one.weight_arriving @ columns)
                inputs = one.input_pass @ columns
                for name, values in (("input", inputs), ("new weight", new), ("weight", later)):
                    found[name][rows] = np.maximum(found[name][rows], values.max(axis=0))
        return found

    def backward(self, reduction: Reduction) -> Items:
        """Items at the peak of a block's backward, what it kept included."""
        items = {name: np.zeros(len(self._at)) for name in ("working set", "gradients", "gathered")}
        fullest = np.full(len(self._at), -np.inf)
        for (rows, _, _), points in zip(self._groups, self._backward_points, strict=True):
            here = reduction.take(rows)
            for found in (one.peak(here) for one in points):
                total = sum(found.values())
                better = total > fullest[rows]
                fullest[rows] = np.where(better, total, fullest[rows])
                for name, values in found.items():
                    items[name][rows] = np.where(better, values, items[name][rows])
        return {"activations": self.kept, "cast weights": self.casts, **items}

    def _points(self, one: Factors, columns: Floats) -> BackwardPoints:
        each, compiled = self._stack.state.gradient / 4.0, self._work.compiled
        return BackwardPoints(
            live=one.live @ columns,
            gradients=each * (one.gradients @ columns),
            live_if_fused=one.live_if_fused @ columns if compiled else None,
            arriving=None if compiled else each * (one.arriving @ columns),
            arrival_names=one.arrival_names,
            arrival_live=one.arrival_live @ columns,
            arrival_gradients=each * (one.arrival_gradients @ columns),
        )

    def after(self) -> Items:
        """Bytes of a block, without gradients, when the gradient of one of its matrices has come."""
        found: Items = {}
        for (rows, _, _), points in zip(self._groups, self._backward_points, strict=True):
            held = self.kept[rows] + self.casts[rows]
            for name, live in zip(points[0].arrival_names, points[0].arrival_live, strict=False):
                found.setdefault(name, np.zeros(len(self._at)))[rows] = live + held
        return found

    def _mean(self, part: str) -> Floats:
        found = np.zeros(len(self._at))
        for rows, columns, blocks in self._groups:
            found[rows] = sum(share * (getattr(one, part) @ columns)[0] for one, share in blocks)
        return found

    def forward(self) -> Floats:
        """Peak of a block's forward, beyond its input."""
        found = np.zeros(len(self._at))
        for rows, columns, blocks in self._groups:
            for one, _ in blocks:
                found[rows] = np.maximum(found[rows], (one.forward @ columns).max(axis=0))
        return found


def _without_gradients(terms: Terms) -> Terms:
    return {name: value for name, value in terms.items() if value < 0 or name not in WEIGHT_MONOMIALS}


Blocks = list[tuple[BlockMemory, float]]
"""Blocks of a layout and the share of layers that each has."""


def _groups(work: Workload, at: Layouts, stack: Framework) -> Iterable[tuple[Rows, Blocks]]:
    """Layouts whose blocks are of the same kinds, by their indices."""
    code = np.zeros(len(at), dtype=np.int64)
    kind = np.where(at.cp > 1, at.cp_kind + 1, 0)
    tp = np.where(at.tp == 1, 0, np.where(at.microbatch_sequences == 1, 1, 2))
    recompute = np.where((at.recompute & FULL) > 0, 2, np.where((at.recompute & NORMS) > 0, 1, 0))
    every = np.where(recompute > 0, at.recompute_every, 1)
    code = code + every
    for column, size in ((kind, 5), (tp, 3), (recompute, 3), (at.zero == 3, 2), (at.ep > 1, 2)):
        code = code * size + column
    for one in np.unique(code):
        rows = np.flatnonzero(code == one)
        yield rows, _blocks_of(work, at, stack, int(rows[0]))


def _blocks_of(work: Workload, at: Layouts, stack: Framework, row: int) -> Blocks:
    tp = "1" if at.tp[row] == 1 else "tp" if at.microbatch_sequences[row] == 1 else "tp_rows"
    bits = int(at.recompute[row])
    recompute = "full" if bits & FULL else "selective" if bits & NORMS else "none"
    weights = "zero3" if at.zero[row] == 3 else "cast" if stack.state.weight > work.working_bytes else "bf16"
    plain = Mode(work.compiled, recompute, weights, "bf16", tp)
    attention, core = _attention(work), _core(at, row)
    found: Blocks = []
    for mlp, share in _mlps(work, ep=int(at.ep[row])):
        for mode, part in _modes(plain, work, every=int(at.recompute_every[row])):
            found.append((block_memory(mode, attention, core, mlp), share * part))
    return found


def _modes(plain: Mode, work: Workload, every: int) -> Iterable[tuple[Mode, float]]:
    """Modes of a layout's blocks and their shares: every k-th is recomputed, and some stay out of fp8."""
    recomputed = 1.0 / every if plain.recompute != "none" else 1.0
    fp8 = work.low_precision_layers if work.is_low_precision else 0.0
    for recompute, part in ((plain.recompute, recomputed), ("none", 1.0 - recomputed)):
        for precision, share in ((work.fp8_recipe, fp8), ("bf16", 1.0 - fp8)):
            if part * share > 0:
                yield plain._replace(recompute=recompute, fp8=precision), part * share


def _attention(work: Workload) -> str:
    attention = work.model.attention
    return "latent" if attention.latent else "qk_norm" if attention.qk_norm else "gqa"


def _core(at: Layouts, row: int) -> str:
    """The core of attention: `plain`, or a kind of cp. Documents and windows keep the same tensors."""
    return CP_KINDS[int(at.cp_kind[row])] if at.cp[row] > 1 else "plain"


def _mlps(work: Workload, ep: int) -> list[tuple[str, float]]:
    model = work.model
    dense = "gelu" if model.mlp.num_matrices == 2 else "swiglu"
    if model.moe is None:
        return [(dense, 1.0)]
    routed = "routed" + ("_shared" if model.moe.shared_width else "") + ("_ep" if ep > 1 else "")
    share = model.moe.first_dense_layers / model.num_layers
    return [(routed, 1.0 - share), *([(dense, share)] if share else [])]
