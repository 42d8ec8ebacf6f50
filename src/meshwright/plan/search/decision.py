"""The decision: the chosen layout with its prediction, what else is on the table, and the run it becomes."""

import time
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import PlanError
from meshwright.hardware.catalogue import Cluster
from meshwright.plan.memory.margins import Margin, memory_margin
from meshwright.plan.memory.rank_bytes import STAGES
from meshwright.plan.search.allow import NumericsChange
from meshwright.plan.search.choose_precision import ChosenPrecision, choose_precision
from meshwright.plan.search.question import Objective, Priced, Question, price_memory, price_time
from meshwright.plan.search.search import TIE_FRACTION, SearchResult
from meshwright.plan.time.pipeline import simulated_items
from meshwright.plan.workload.layouts import (
    CP_KINDS,
    FULL,
    OFFLOAD_BITS,
    RECOMPUTE_BITS,
    Ints,
    Layouts,
    one_layout,
)
from meshwright.spec.check import check
from meshwright.spec.run import RunSpec
from meshwright.units import show_bytes

NUM_PARETO = 24
NUM_SIMULATED = 8
"""The best layouts by closed form whose pipelines are simulated before one is chosen."""
RECOMPUTE_NAMES = {bits: word for word, bits in RECOMPUTE_BITS.items()}
SECONDS_PER_DAY = 86400.0


@dataclass(frozen=True)
class Candidate:
    """One layout with everything predicted about it."""

    question: Question
    at: Layouts
    """One row."""

    @cached_property
    def run(self) -> RunSpec:
        """The complete run with this layout."""
        return with_layout(self.question.run, self.at)

    @cached_property
    def memory_items(self) -> dict[str, dict[str, float]]:
        """Bytes by item for the first, a middle and the last pipeline rank."""
        found = price_memory(self.question, self.at)
        items = {**found.items, "fragmentation": found.fragmentation, **found.outside}
        return {
            stage: {name: float(column[0, index]) for name, column in items.items()}
            for index, stage in enumerate(STAGES)
        }

    @cached_property
    def host_items(self) -> dict[str, dict[str, float]]:
        """Bytes in host memory, for the same ranks."""
        host = price_memory(self.question, self.at).host
        return {
            stage: {name: float(column[0, index]) for name, column in host.items()}
            for index, stage in enumerate(STAGES)
        }

    @cached_property
    def device_bytes(self) -> float:
        """On the device of the fullest rank."""
        return float(price_memory(self.question, self.at).peak_device_bytes[0])

    @cached_property
    def reserved_bytes(self) -> float:
        """Held by torch's allocator on the fullest rank."""
        return float(price_memory(self.question, self.at).peak_reserved_bytes[0])

    @cached_property
    def allocated_bytes(self) -> float:
        """Of tensors on the fullest rank."""
        return float(price_memory(self.question, self.at).peak_allocated_bytes[0])

    @cached_property
    def memory_margin(self) -> Margin | None:
        """How far allocated bytes may be off, either way."""
        return memory_margin(self.question.work, self.at, self.question.stack)

    @cached_property
    def peak_stage(self) -> str:
        """Which pipeline rank is fullest."""
        return STAGES[int(price_memory(self.question, self.at).peak_stage[0])]

    @cached_property
    def seconds_items(self) -> dict[str, float]:
        """Seconds of a step by item; they sum to `step_seconds`."""
        cost = price_time(self.question, self.at)
        items = {name: float(np.atleast_1d(column)[0]) for name, column in cost.items.items()}
        return simulated_items(self.run, self.question.work, self.at, cost, items)

    @cached_property
    def interval_seconds(self) -> tuple[float, float]:
        """Where nine of ten measured steps lie."""
        cost = price_time(self.question, self.at)
        half_width = float(np.atleast_1d(cost.relative_half_width)[0])
        return self.step_seconds / (1.0 + half_width), self.step_seconds * (1.0 + half_width)

    @property
    def fits(self) -> bool:
        """Whether the fullest rank stays inside what a plan may use."""
        needed = price_memory(self.question, self.at)
        on_host = bool(needed.fits_host(self.question.cluster)[0])
        return on_host and self.device_bytes <= self.question.memory_budget_bytes

    @property
    def may_fit(self) -> bool:
        """Whether it stays inside the device at all, as `predict` judges a given run."""
        return bool(price_memory(self.question, self.at).fits(self.question.cluster)[0])

    @property
    def step_seconds(self) -> float:
        """One optimizer step."""
        return sum(self.seconds_items.values())

    @property
    def num_ranks(self) -> int:
        """Devices in use."""
        return int(self.at.num_ranks[0])

    @property
    def tokens_per_second(self) -> float:
        """Of the whole run."""
        return self.question.run.data.batch_tokens / self.step_seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs over the data sheet's dense peak."""
        work = self.question.work
        peak = self.num_ranks * self.question.cluster.device.peak(work.matmul_rate)
        return self.tokens_per_second * work.model_flops_per_token / peak

    def days(self, tokens: int) -> float:
        """Days to train this many tokens without interruption."""
        return tokens / self.tokens_per_second / SECONDS_PER_DAY

    def device_hours(self, tokens: int) -> float:
        """Devices times hours for this many tokens."""
        return self.days(tokens) * 24.0 * self.num_ranks


def with_layout(run: RunSpec, at: Layouts) -> RunSpec:
    """The run with the first layout of a table."""
    bits = int(at.recompute[0])
    recompute = run.memory.with_(
        recompute=RECOMPUTE_NAMES[bits],
        recompute_every=int(at.recompute_every[0]) if bits else 1,
        offload=[word for word, bit in OFFLOAD_BITS.items() if int(at.offload[0]) & bit],
    )
    return run.with_(
        parallel=at.parallel(0),
        memory=recompute,
        data=run.data.with_(microbatch_sequences=int(at.microbatch_sequences[0])),
    )


def candidate_of(run: RunSpec, cluster: Cluster) -> Candidate:
    """What is predicted about exactly this run on this cluster."""
    at = one_layout(
        run.parallel,
        run.memory,
        microbatch_sequences=run.data.microbatch_sequences,
        num_microbatches=run.accumulation,
    )
    return Candidate(Question(run, cluster), at)


@dataclass(frozen=True)
class Plan:
    """What was decided, and what it was decided against."""

    question: Question
    """In the formats that were settled on."""
    best: Candidate
    top: tuple[Candidate, ...]
    """The best of each mesh, the chosen one first."""
    pareto: tuple[Candidate, ...]
    """No other layout is at once faster, leaner and smaller than one of these."""
    found: SearchResult
    search_seconds: float
    changes: tuple[NumericsChange, ...] = ()
    """What it takes of what was allowed."""


def make_plan(question: Question, *, top: int = 8) -> Plan:
    """Search, choose, and keep the alternatives; raises PlanError when nothing fits."""
    start = time.perf_counter()
    settled = choose_precision(question)
    return choose(settled, top=top, search_seconds=time.perf_counter() - start)


def choose(settled: ChosenPrecision, *, top: int, search_seconds: float) -> Plan:
    """The best of what was found; raises PlanError when nothing fits."""
    question, found = settled.question, settled.found
    if len(found.fitting) == 0:
        raise no_fit_error(question, found)
    order = ranking(found.fitting, question.objective, settled.best_score)
    rows = dict.fromkeys(
        [*map(int, order[:NUM_SIMULATED]), *_first_of_each_mesh(found.fitting.layouts, order, top)]
    )
    simulated = _ranked([Candidate(question, found.fitting.layouts.take([row])) for row in rows])
    best = next((candidate for candidate in simulated if not check(candidate.run)), None)
    if best is None:
        violation = check(simulated[0].run)[0]
        raise PlanError(f"the rules refuse the best layouts: {violation.fact}", hint=violation.hint)
    return Plan(
        question=question,
        best=best,
        top=tuple(_one_per_mesh([best, *simulated])[:top]),
        pareto=tuple(
            Candidate(question, found.fitting.layouts.take([row])) for row in pareto_rows(found.fitting)
        ),
        found=found,
        search_seconds=search_seconds,
        changes=settled.changes,
    )


def _ranked(candidates: list[Candidate]) -> list[Candidate]:
    """From best to worst by simulated time, by the same rules as `ranking`."""
    rows = [candidate.at for candidate in candidates]
    at = Layouts(**{f.name: np.concatenate([getattr(row, f.name) for row in rows]) for f in fields(Layouts)})
    reserved = np.array([candidate.device_bytes for candidate in candidates])
    priced = Priced(at, reserved, np.array([candidate.step_seconds for candidate in candidates]))
    return [candidates[row] for row in ranking(priced, candidates[0].question.objective)]


def _one_per_mesh(candidates: list[Candidate]) -> list[Candidate]:
    seen: dict[tuple[int, ...], Candidate] = {}
    for candidate in candidates:
        seen.setdefault(tuple(int(row[0]) for row in _mesh_columns(candidate.at)), candidate)
    return list(seen.values())


def _mesh_columns(at: Layouts) -> tuple[NDArray[np.int64], ...]:
    return (at.dp_replicate, at.dp_shard, (at.zero > 0).astype(np.int64), at.cp, at.tp, at.pp, at.ep)


def complexity(at: Layouts) -> Ints:
    """How many things a layout adds to plain data parallelism: equals are decided for the simpler."""
    return (
        at.zero
        + 2 * ((at.dp_replicate > 1) & (at.dp_shard > 1))
        + 2 * (at.recompute > 0)
        + (at.recompute == FULL)
        + (at.recompute_every > 1)
        + 3 * (at.tp > 1)
        + 4 * (at.cp > 1)
        + (at.cp_kind == CP_KINDS.index("hierarchical"))
        + 5 * (at.pp > 1)
        + (at.virtual_stages > 1)
        + (at.ep > 1)
        + 6 * (at.offload > 0)
        + 2 * ((at.offload & OFFLOAD_BITS["parameters"]) > 0)
    ).astype(np.int64)


def ranking(priced: Priced, objective: Objective, best: float = np.inf) -> NDArray[np.intp]:
    """Rows from best to worst; among the equally good first the simplest (speed) or the fastest.

    `best`: the best score there is, where it is not among these.
    """
    score = priced.score(objective)
    close = score <= max(score.min(), min(score.min(), best) * (1.0 + TIE_FRACTION))
    tie = complexity(priced.layouts) if objective == "speed" else priced.step_seconds
    tie = np.where(close, tie, np.inf)
    return np.lexsort((priced.layouts.num_ranks, score, tie, ~close))


def _first_of_each_mesh(at: Layouts, order: NDArray[np.intp], count: int) -> list[int]:
    meshes = np.stack(_mesh_columns(at), axis=1)[order]
    _, first = np.unique(meshes, axis=0, return_index=True)
    return [int(order[position]) for position in np.sort(first)[:count]]


def pareto_rows(priced: Priced) -> list[int]:
    """Rows that no other beats in step time, memory and devices at once, from fast to slow."""
    axes = np.stack(
        [priced.step_seconds, priced.device_bytes, priced.layouts.num_ranks.astype(float)], axis=1
    )
    order = np.lexsort((axes[:, 2], axes[:, 1], axes[:, 0]))
    kept: list[int] = []
    for row in order:
        if not any(np.all(axes[other] <= axes[row] * 1.001) for other in kept):
            kept.append(int(row))
        if len(kept) >= NUM_PARETO:
            break
    return kept


def no_fit_error(question: Question, found: SearchResult) -> PlanError:
    """Nothing fits: the numbers of the layout that comes closest."""
    budget = show_bytes(question.memory_budget_bytes)
    if found.least_memory is None:
        return PlanError("no layout satisfies the pins", where="pins")
    need = show_bytes(float(found.least_memory.device_bytes[0]))
    devices = question.cluster.num_devices
    fact = (
        f"{question.run.model.family} does not fit on {devices} x {question.cluster.device.title}: "
        f"the layout with the least memory needs {need} per device of {budget}"
    )
    return PlanError(fact, where="--on")
