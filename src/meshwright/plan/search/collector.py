"""Prices blocks of meshes and keeps the best layouts of each group.

Seconds are priced before bytes, because they cost a quarter as much: only the layouts that are fast enough
are asked whether they fit.
"""

from collections.abc import Iterator
from dataclasses import fields, replace

import numpy as np
from numpy.typing import NDArray

from meshwright.plan.memory.rank_bytes import MANY_LAYOUTS, Memory
from meshwright.plan.search.meshes import Table, filter_rows
from meshwright.plan.search.question import (
    Objective,
    Priced,
    Question,
    distance,
    memory_use,
    price,
    price_memory,
    price_time,
)
from meshwright.plan.search.space import (
    expand,
    expand_table,
    least_memory_layouts,
    offloaded,
    recompute_choices,
)
from meshwright.plan.workload.layouts import RECOMPUTE_NONE, Floats, Ints, Layouts, concatenated

KEPT_WITHIN = 1.5
"""Layouts that are slower than the best by this factor are not asked whether they fit."""
SIMULATED_WITHIN = 1.1
"""Simulated, a pipeline may be slower than in closed form by this factor: what could still win is kept."""
FIRST_ROWS = 1024
"""How many of the fastest layouts of a block are asked first whether they fit."""
MAX_KEPT = 20_000
MESH_COLUMNS = ("tp", "cp", "cp_kind", "cp_inner", "cp_stripes", "ep", "etp", "ep_overlap", "pp", "dp")
MeshKey = tuple[int, ...]
"""The values of MESH_COLUMNS."""
GROUP_COLUMNS = (
    "dp_replicate",
    "dp_shard",
    "zero",
    "cp",
    "tp",
    "pp",
    "ep",
    "recompute",
    "schedule",
    "offload",
)


class Collector:
    """Prices block after block of meshes and keeps the best layouts of each group."""

    def __init__(self, question: Question, *, within: float = KEPT_WITHIN, below: float = np.inf) -> None:
        self.question = question
        self.num_considered = 0
        self.num_fitting = 0
        self.best_score = np.inf
        """The best score of a layout that fits."""
        self._best_is_pipeline = False
        self._within, self._below = within, below
        self._parts: list[Priced] = []
        self._without_recompute: dict[MeshKey, float] = {}
        """The best score of each mesh without recompute, whether it fits or not."""
        self._priced_ahead: dict[MeshKey, int] = {}
        """How many layouts that took, until the mesh is considered."""
        self._least_fits: dict[bool, dict[MeshKey, bool]] = {False: {}, True: {}}
        """Whether the layout with the least memory on each mesh fits, without and with offload."""
        self._closest: tuple[float, Priced] | None = None
        """Where nothing fits: the layout that comes closest, and its `distance`."""
        self._closest_bound: tuple[float, Priced] | None = None
        """The same among meshes on which no layout can fit."""
        self._some_mesh_fits = False

    def add(self, block: Table) -> None:
        """Price the layouts of one block of meshes that keep everything on the device."""
        block = self._meshes_that_may_win(block, within=self._within)
        block = filter_rows(block, self._may_fit(block, offloads=False))
        table = expand_table(self.question, _numbered(block), recompute_choices(self.question.pins))
        mesh, layouts = table.pop("mesh"), Layouts(**table)
        self.num_considered += len(layouts)
        score, seconds = self._priced_time(layouts)
        self._note_without_recompute(block, mesh, layouts, score)
        self._keep_fitting(layouts, score, seconds, within=self._within)

    def add_savers(self, block: Table) -> None:
        """Price the layouts of one block that could beat the best so far, also with host memory."""
        within, may_offload = self._saver_within, self._may_offload
        block = self._meshes_that_may_win(block, within=within)
        block = filter_rows(block, self._may_fit(block, offloads=may_offload))
        layouts = expand(self.question, block)
        self.num_considered += len(layouts)
        too_large = self._keep_fitting(layouts, *self._priced_time(layouts), within=within)
        # What fits on the device is only slower with offload.
        if may_offload and len(too_large):
            with_host = offloaded(self.question, too_large)
            self.num_considered += len(with_host)
            self._keep_fitting(with_host, *self._priced_time(with_host), within=within)

    def look_ahead(self, batch: Table, *, savers: bool) -> None:
        """Price together what `add` or `add_savers` will ask of the meshes of the next blocks.

        What it prices too much, because a block improves the best score, is not considered.
        """
        within, offloads = self._within, False
        if savers:
            within, offloads = self._saver_within, self._may_offload
        limit = self._limit(within)
        if np.isfinite(limit):
            self._price_without_recompute(batch)
            batch = filter_rows(batch, self._best_without_recompute(batch) < limit)
        self._price_least_memory(batch, offloads=offloads)

    @property
    def _saver_within(self) -> float:
        return self.saver_limit / self.best_score if np.isfinite(self.best_score) else 1.0

    @property
    def _may_offload(self) -> bool:
        """With adapters offload was proved and not measured: it is for what does not fit otherwise."""
        is_needed = self.question.run.adapter is None or not self._fits_without_host
        return self.question.may_offload and is_needed

    def _limit(self, within: float) -> float:
        """The score beyond which a layout is of no interest."""
        return min(within * self.best_score, self._below)

    @property
    def _fits_without_host(self) -> bool:
        """Whether a layout fits on the device; one that is slower than `below` was not kept, yet it fits."""
        return bool(np.isfinite(self.best_score)) or (np.isfinite(self._below) and self._some_mesh_fits)

    @property
    def saver_limit(self) -> float:
        """The score up to which a layout that saves memory may still win once the best is simulated."""
        return (SIMULATED_WITHIN if self._best_is_pipeline else 1.0) * self.best_score

    def result(self) -> tuple[Priced, Priced | None]:
        """Everything that was kept, the best first; and the layout that comes closest where nothing fits."""
        fitting = concatenate(self._parts) if self._parts else _nothing()
        order = np.argsort(fitting.score(self.question.objective), kind="stable")[:MAX_KEPT]
        # A mesh could fit and yet has no layout: the pins contradict each other, and no bytes explain it.
        bound = None if self._some_mesh_fits else self._closest_bound
        closest = self._closest or bound
        return fitting.take(order), None if closest is None else closest[1]

    def _priced_time(self, layouts: Layouts) -> tuple[Floats, Floats]:
        """The value that the objective minimises as far as time decides it, and the seconds of a step."""
        if len(layouts) == 0:
            return np.zeros(0), np.zeros(0)
        seconds = price_time(self.question, layouts).step_seconds
        if self.question.objective == "memory":
            return np.zeros_like(seconds), seconds
        return Priced(layouts, seconds, seconds).score(self.question.objective), seconds

    def _may_fit(self, block: Table, *, offloads: bool) -> NDArray[np.bool_]:
        """Whether the layout with the least memory on each mesh fits the device."""
        self._price_least_memory(block, offloads=offloads)
        known = self._least_fits[offloads]
        may_fit = np.array([known[key] for key in _mesh_keys(block)], dtype=bool)
        self.num_considered += 3 * int((~may_fit).sum())
        self._some_mesh_fits = self._some_mesh_fits or bool(may_fit.any())
        return may_fit

    def _price_least_memory(self, meshes: Table, *, offloads: bool) -> None:
        """Note whether the layout with the least memory fits, for each mesh where this is not known yet."""
        known = self._least_fits[offloads]
        new = filter_rows(meshes, np.array([key not in known for key in _mesh_keys(meshes)], dtype=bool))
        if len(new["tp"]) == 0:
            return
        smallest = least_memory_layouts(self.question, new, offloads=offloads)
        needed = self._memory(smallest)
        least = needed.peak_device_bytes.reshape(-1, 3).min(axis=1)
        may_fit = least <= self.question.memory_budget_bytes
        known.update(zip(_mesh_keys(new), may_fit.tolist(), strict=True))
        if not may_fit.all() and not np.isfinite(self.best_score):
            far = np.where(np.repeat(may_fit, 3), np.inf, self._least_distance(needed))
            self._closest_bound = self._closer(self._closest_bound, smallest, far, limit=len(smallest) + 1)

    def _meshes_that_may_win(self, block: Table, *, within: float) -> Table:
        """The meshes on which a layout without recompute is at most so many times slower than the best.

        Nothing on the same mesh is faster, so the others are not asked whether they fit.
        """
        limit = self._limit(within)
        if not np.isfinite(limit) or len(block["tp"]) == 0:
            return block
        self._price_without_recompute(block)
        self.num_considered += sum(self._priced_ahead.pop(key, 0) for key in _mesh_keys(block))
        return filter_rows(block, self._best_without_recompute(block) < limit)

    def _best_without_recompute(self, block: Table) -> Floats:
        known = self._without_recompute
        return np.array([known.get(key, np.inf) for key in _mesh_keys(block)], dtype=np.float64)

    def _price_without_recompute(self, meshes: Table) -> None:
        """Note the best score without recompute of each mesh where it is not known yet."""
        known = self._without_recompute
        new = filter_rows(meshes, np.array([key not in known for key in _mesh_keys(meshes)], dtype=bool))
        table = expand_table(self.question, _numbered(new), [(RECOMPUTE_NONE, 1)])
        mesh, layouts = table.pop("mesh"), Layouts(**table)
        self._note_without_recompute(new, mesh, layouts, self._priced_time(layouts)[0])
        counts = np.bincount(mesh, minlength=len(new["tp"])).tolist()
        for key, count in zip(_mesh_keys(new), counts, strict=True):
            self._priced_ahead[key] = self._priced_ahead.get(key, 0) + count

    def _note_without_recompute(self, block: Table, mesh: Ints, layouts: Layouts, score: Floats) -> None:
        best = np.full(len(block["tp"]), np.inf)
        plain = layouts.recompute == RECOMPUTE_NONE
        np.minimum.at(best, mesh[plain], score[plain])
        for key, value in zip(_mesh_keys(block), best, strict=True):
            if np.isfinite(value):
                self._without_recompute[key] = float(value)

    def _keep_fitting(self, layouts: Layouts, score: Floats, seconds: Floats, *, within: float) -> Layouts:
        """Keep what fits and is at most so many times slower than the best; returns what does not fit."""
        too_large: list[NDArray[np.intp]] = []
        for rows in _growing(np.argsort(score, kind="stable")):
            fast = rows[score[rows] <= min(within * self.best_score, self._below)]
            if len(fast):
                fits = self._keep(layouts.take(fast), seconds[fast])
                too_large.append(fast[~fits])
        rows = np.concatenate(too_large) if too_large else np.zeros(0, np.intp)
        return layouts.take(rows[score[rows] < max(within, 1.0) * self.best_score])

    def _keep(self, layouts: Layouts, seconds: Floats) -> NDArray[np.bool_]:
        """Price the memory of these layouts, keep those that fit, and say which they are."""
        needed = self._memory(layouts)
        use = memory_use(self.question, needed)
        fits = use <= 1.0
        self.num_fitting += int(fits.sum())
        if fits.any():
            priced = Priced(layouts.take(fits), needed.peak_device_bytes[fits], seconds[fits])
            self._note_best(priced)
            self._parts.append(best_of_groups(priced, self.question.objective))
        elif not np.isfinite(self.best_score):
            limit = 0 if len(layouts) >= MANY_LAYOUTS else len(layouts) + 1
            self._closest = self._closer(self._closest, layouts, self._least_distance(needed), limit=limit)
        return fits

    def _memory(self, layouts: Layouts) -> Memory:
        """Bytes of layouts that fit, and less for those that do not."""
        return price_memory(self.question, layouts, budget=self.question.memory_budget_bytes)

    def _least_distance(self, needed: Memory) -> Floats:
        """How far layouts are from fitting at least: fragmentation may be less at the peak than before it."""
        return distance(self.question, replace(needed, fragmentation=0.0 * needed.fragmentation))

    def _note_best(self, priced: Priced) -> None:
        score = priced.score(self.question.objective)
        row = int(score.argmin())
        if score[row] < self.best_score:
            self.best_score, self._best_is_pipeline = float(score[row]), bool(priced.layouts.pp[row] > 1)

    def _closer(
        self, known: tuple[float, Priced] | None, layouts: Layouts, least: Floats, *, limit: int
    ) -> tuple[float, Priced] | None:
        """The closer of what is known and the closest of these layouts.

        `least` is how far each is from fitting at least; only those that may be closer are priced in full.
        """
        best, row = np.inf if known is None else known[0], -1
        for rows in _growing(np.argsort(least, kind="stable"), FIRST_ROWS // 16):
            near = np.sort(rows[(least[rows] <= best) & np.isfinite(least[rows])])
            if len(near) == 0:
                break
            far = distance(self.question, price_memory(self.question, layouts.take(near), limit=limit))
            first = int(far.argmin())
            # Of equally close ones the first is kept.
            if far[first] < best or (far[first] == best and 0 <= near[first] < row):
                best, row = float(far[first]), int(near[first])
        return known if row < 0 else (best, price(self.question, layouts.take([row])))


def _numbered(block: Table) -> Table:
    """The block with the position of each mesh as a column."""
    return {**block, "mesh": np.arange(len(block["tp"]))}


def _mesh_keys(block: Table) -> list[MeshKey]:
    """What tells a mesh from others."""
    return list(zip(*(block[name].tolist() for name in MESH_COLUMNS), strict=True))


def _growing(order: NDArray[np.intp], size: int = FIRST_ROWS) -> Iterator[NDArray[np.intp]]:
    """The rows in parts, the first ones small: what is found among them bounds the rest."""
    first = 0
    while first < len(order):
        yield order[first : first + size]
        first, size = first + size, 4 * size


def _nothing() -> Priced:
    nothing = np.zeros(0)
    return Priced(Layouts(**{f.name: np.zeros(0, np.int64) for f in fields(Layouts)}), nothing, nothing)


def concatenate(parts: list[Priced]) -> Priced:
    """The rows of several tables in one."""
    return Priced(
        concatenated([part.layouts for part in parts]),
        np.concatenate([part.device_bytes for part in parts]),
        np.concatenate([part.step_seconds for part in parts]),
    )


def best_of_groups(priced: Priced, objective: Objective) -> Priced:
    """The best, the fastest and the smallest layout of each group with equal GROUP_COLUMNS."""
    keys = np.stack([getattr(priced.layouts, name) for name in GROUP_COLUMNS], axis=1)
    _, inverse = np.unique(keys, axis=0, return_inverse=True)
    rows: list[NDArray[np.intp]] = []
    for score in (priced.score(objective), priced.step_seconds, priced.device_bytes):
        order = np.lexsort((score, inverse.ravel()))
        _, first = np.unique(inverse.ravel()[order], return_index=True)
        rows.append(order[first])
    return priced.take(np.unique(np.concatenate(rows)))
