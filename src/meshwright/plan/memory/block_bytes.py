"""Bytes of one block of every layout: the table's sums of monomials, evaluated for many layouts at once."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from meshwright.plan.framework import Framework
from meshwright.plan.memory.block_table import BlockMemory, Mode, Terms, block_memory
from meshwright.plan.memory.dims import WEIGHT_MONOMIALS, dims_of, evaluate
from meshwright.plan.workload.layouts import CP_KINDS, FULL, NORMS, Floats, Layouts
from meshwright.plan.workload.workload import Workload

Items = dict[str, Floats]
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


@dataclass(frozen=True)
class Reduction:
    """How the gradients of a block meet earlier ones; every array has shape (M,)."""

    accumulates: NDArray[np.bool_]
    """Gradients are there already: new ones are added to them and freed."""
    fused: NDArray[np.bool_]
    """Compiled matmuls add to them in place (weight-gradient accumulation fusion)."""
    buckets: Mapping[str, Floats]
    """Bytes of the bucket that the gradient of a matrix completes, as it is launched."""


class BlockBytes:
    """What the blocks of M layouts keep and hold at their peaks; every array has shape (M,)."""

    def __init__(self, work: Workload, at: Layouts, stack: Framework) -> None:
        self._work, self._at, self._stack = work, at, stack
        self._dims = dims_of(work.model, work.sequence_length, at)
        self._columns: dict[str, Floats] = {}
        self._groups = list(_groups(work, at, stack))
        self.kept = self._mean("kept")
        self.casts = self._mean("casts")
        self.remembered = self._mean("remembered")
        self.forward = self._forward()
        self.split = self._split()

    def _split(self) -> Items:
        """Peaks of a split backward, and what a block holds between its passes."""
        found = {name: np.zeros(len(self._at)) for name in _SPLIT_NAMES}
        each = self._stack.state.gradient / 4.0
        for rows, blocks in self._groups:
            if (self._at.pp[rows] == 1).all() or not blocks[0][0].between:
                continue
            for name in ("between", "leftover"):
                mean = sum(share * self._sum(getattr(block, name)) for block, share in blocks)
                found[name] = np.where(rows, mean, found[name])
            for block, _ in blocks:
                live = self._stack_of(one.live for one in block.weight_pass)
                new = live + each * self._stack_of(one.gradients for one in block.weight_pass)
                later = live + each * self._stack_of(one.arriving for one in block.weight_pass)
                inputs = self._stack_of(one.live for one in block.input_pass)
                for name, values in (("input", inputs), ("new weight", new), ("weight", later)):
                    peak = np.maximum(found[name], values.max(axis=0))
                    found[name] = np.where(rows, peak, found[name])
        return found

    def backward(self, reduction: Reduction) -> Items:
        """Items at the peak of a block's backward, what it kept included."""
        items = {name: np.zeros(len(self._at)) for name in ("working set", "gradients", "gathered")}
        fullest = np.full(len(self._at), -np.inf)
        for rows, blocks in self._groups:
            for block, _ in blocks:
                found = self._backward(block, reduction)
                total = sum(found.values())
                better = rows & (total > fullest)
                fullest = np.where(better, total, fullest)
                for name, values in found.items():
                    items[name] = np.where(better, values, items[name])
        return {"activations": self.kept, "cast weights": self.casts, **items}

    def _backward(self, block: BlockMemory, reduction: Reduction) -> Items:
        points, each = block.backward, self._stack.state.gradient / 4.0
        live = self._stack_of(one.live for one in points)
        gradients = each * self._stack_of(one.gradients for one in points)
        if self._work.compiled:
            fused = self._stack_of(_without_gradients(one.live) for one in points)
            live = np.where(reduction.fused, fused, live)
            gradients = np.where(reduction.fused, 0.0, gradients)
        else:
            arriving = each * self._stack_of(one.arriving for one in points)
            gradients = np.where(reduction.accumulates, arriving, gradients)
        best = (live + gradients).argmax(axis=0)
        columns = np.arange(len(self._at))
        live, gradients = live[best, columns], gradients[best, columns]
        # What is added to earlier gradients is freed with it.
        passing = np.where(reduction.accumulates, gradients, 0.0)
        found = {"working set": live + passing, "gradients": gradients - passing}
        found["gathered"] = np.zeros(len(self._at))
        return self._with_launches(found, block, reduction)

    def _with_launches(self, found: Items, block: BlockMemory, reduction: Reduction) -> Items:
        """The same, or a bucket that is launched within the block where that is fuller."""
        for name, (live, gradients) in self._arrivals(block).items():
            if name in reduction.buckets:
                bucket = reduction.buckets[name]
                made = np.where(reduction.accumulates, 0.0, gradients)
                better = (bucket > 0) & (live + made + bucket > sum(found.values()))
                new = {"working set": live, "gradients": made, "gathered": bucket}
                found = {item: np.where(better, new[item], values) for item, values in found.items()}
        return found

    def after(self) -> Items:
        """Bytes of a block, without gradients, when the gradient of one of its matrices has come."""
        found: Items = {}
        for rows, blocks in self._groups:
            for name, (live, _) in self._arrivals(blocks[0][0]).items():
                whole = live + self.kept + self.casts
                found[name] = np.where(rows, whole, found.get(name, np.zeros(len(self._at))))
        return found

    def _arrivals(self, block: BlockMemory) -> dict[str, tuple[Floats, Floats]]:
        """Live bytes and gradients so far at the arrival of each matrix's gradient."""
        each = self._stack.state.gradient / 4.0
        found: dict[str, tuple[Floats, Floats]] = {}
        counts: dict[str, int] = {}
        last = block.arrivals[-1:] if self._work.compiled else []
        for one in block.arrivals:
            for monomial in one.arriving:
                names = MATRICES.get(monomial, ())
                index = counts.get(monomial, 0)
                counts[monomial] = index + 1
                if index < len(names):
                    point = (last or [one])[0]  # a compiled block hands all gradients over at its end
                    live, gradients = self._sum(point.live), each * self._sum(point.gradients)
                    found[names[index]] = (live, gradients)
        return found

    def _mean(self, part: str) -> Floats:
        found = np.zeros(len(self._at))
        for rows, blocks in self._groups:
            values = sum(share * self._sum(getattr(block, part)) for block, share in blocks)
            found = np.where(rows, values, found)
        return found

    def _forward(self) -> Floats:
        found = np.zeros(len(self._at))
        for rows, blocks in self._groups:
            for block, _ in blocks:
                peak = self._stack_of(one.live for one in block.forward).max(axis=0)
                found = np.where(rows, np.maximum(found, peak), found)
        return found

    def _stack_of(self, terms: Iterable[Terms]) -> Floats:
        rows = [self._sum(one) for one in terms]
        return np.stack(rows) if rows else np.zeros((1, len(self._at)))

    def _sum(self, terms: Terms) -> Floats:
        found = np.zeros(len(self._at))
        for name, factor in terms.items():
            if name not in self._columns:
                self._columns[name] = evaluate(name, self._dims)
            found = found + factor * self._columns[name]
        return found


def _without_gradients(terms: Terms) -> Terms:
    return {name: value for name, value in terms.items() if value < 0 or name not in WEIGHT_MONOMIALS}


Blocks = list[tuple[BlockMemory, float]]
"""Blocks of a layout and the share of layers that each has."""


def _groups(work: Workload, at: Layouts, stack: Framework) -> Iterable[tuple[NDArray[np.bool_], Blocks]]:
    """Layouts whose blocks are of the same kinds."""
    code = np.zeros(len(at), dtype=np.int64)
    kind = np.where(at.cp > 1, at.cp_kind + 1, 0)
    tp = np.where(at.tp == 1, 0, np.where(at.microbatch_sequences == 1, 1, 2))
    recompute = np.where((at.recompute & FULL) > 0, 2, np.where((at.recompute & NORMS) > 0, 1, 0))
    every = np.where(recompute > 0, at.recompute_every, 1)
    code = code + every
    for column, size in ((kind, 5), (tp, 3), (recompute, 3), (at.zero == 3, 2), (at.ep > 1, 2)):
        code = code * size + column
    for one in np.unique(code):
        rows = code == one
        first = int(np.argmax(rows))
        yield rows, _blocks_of(work, at, stack, first)


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
