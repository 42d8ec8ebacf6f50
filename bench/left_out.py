"""Errors on rows that took no part in choosing what they are predicted with.

Step times of published runs have this in bench/calibrate.py, by source. Here are the two other figures of the
accuracy page: the ranking of layouts, with the model's own rows left out, and the memory of other
frameworks, with the row's source left out.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from bench.vtrain import VtrainRow, spearman, vtrain_groups

from meshwright.plan.framework import Framework
from meshwright.published.frameworks import Peer, find_framework
from meshwright.published.predict import GIB, predict_table_run
from meshwright.published.table import TableRun

LAUNCHES = (30.0, 45.0, 60.0, 80.0, 95.0, 120.0, 150.0)
MESSAGES = (0.4, 0.6, 0.8, 1.0, 1.3, 1.6, 2.2)
"""Factors on exposed communication."""
MEMORY_FACTS = tuple(
    {
        "saves_gathered_input": gathered,
        "eager_activation": eager,
        "rotation_bytes": rotated,
        "logits_bytes": each,
    }
    for gathered, eager, rotated, each in product((False, True), (False, True), (0.0, 2.0), (8.0, 12.0))
)
"""What a framework keeps where its source does not say: every combination is tried on the other rows."""


@dataclass(frozen=True)
class LeftOutRanking:
    """Rank correlation of one model's layouts with a constant that its rows did not choose."""

    label: str
    layouts: int
    chosen: float
    """The constant that ranks the other rows best."""
    spearman: float
    spearman_by_own_rows: float
    """With the value that ranks these rows best."""


def one_node_rankings() -> list[LeftOutRanking]:
    """One node: launches per layer are chosen on the other models, and tried on each model's groups."""
    base = find_framework("megatron-deepspeed")
    tried = {value: vtrain_groups(replace(base, launches_per_layer=value)) for value in LAUNCHES}
    models: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index, group in enumerate(tried[LAUNCHES[0]]):
        models[group.width, group.num_layers].append(index)

    def score(value: float, indices: Sequence[int]) -> float:
        return float(np.median([tried[value][index].spearman for index in indices]))

    found: list[LeftOutRanking] = []
    for (width, layers), own in models.items():
        others = [index for rest in models.values() if rest is not own for index in rest]
        label = f"width {width}, {layers} layers"
        count = sum(len(tried[LAUNCHES[0]][index].measured) for index in own)
        found.append(
            _ranking(label, count, LAUNCHES, lambda v, o=others: score(v, o), lambda v, o=own: score(v, o))
        )
    return found


def several_nodes_rankings(models: dict[str, list[VtrainRow]]) -> list[LeftOutRanking]:
    """Several nodes: the time of messages against kernels is chosen on the other models."""
    base = find_framework("megatron-deepspeed")

    def score(value: float, names: Sequence[str]) -> float:
        framework = replace(base, exposed_communication=value)
        return float(np.median([spearman(models[name], framework) for name in names]))

    return [
        _ranking(
            *(name, len(rows), MESSAGES),
            lambda value, own=name: score(value, [each for each in models if each != own]),
            lambda value, own=name: score(value, [own]),
        )
        for name, rows in models.items()
    ]


def _ranking(
    label: str,
    count: int,
    values: Sequence[float],
    by_others: Callable[[float], float],
    by_own: Callable[[float], float],
) -> LeftOutRanking:
    chosen = max(values, key=by_others)
    own = {value: by_own(value) for value in values}
    return LeftOutRanking(label, count, chosen, own[chosen], max(own.values()))


@dataclass(frozen=True)
class MemoryRow:
    """A published figure of memory."""

    line: int
    source: str
    run: TableRun
    published_gb: float


@dataclass(frozen=True)
class LeftOutMemory:
    """Predicted over published memory, with facts of the framework that other sources chose."""

    row: MemoryRow
    reserved_ratio: float
    allocated_ratio: float


def memory_left_out(rows: Sequence[MemoryRow]) -> list[LeftOutMemory]:
    """Every row, with the memory facts of its framework chosen on the rows of other sources.

    Rows of the same framework choose where it has another source, else those of all other frameworks do.
    """
    ratios = {row.line: [_ratios(row, facts) for facts in MEMORY_FACTS] for row in rows}
    found: list[LeftOutMemory] = []
    for row in rows:
        others = [each for each in rows if each.source != row.source]
        same = [each for each in others if each.run.framework.name == row.run.framework.name]
        errors = np.array([[abs(pair[0] - 1.0) for pair in ratios[each.line]] for each in same or others])
        best = int(np.median(errors, axis=0).argmin())
        found.append(LeftOutMemory(row, *ratios[row.line][best]))
    return found


def _ratios(row: MemoryRow, facts: dict[str, object]) -> tuple[float, float]:
    """Reserved and allocated over published, with these facts in the place of the framework's."""
    framework: Framework = row.run.framework
    if isinstance(framework, Peer):
        framework = replace(framework, **facts)  # pyright: ignore[reportArgumentType]  (names of its fields)
    stage = predict_table_run(replace(row.run, framework=framework)).peak_stage
    return stage.reserved_bytes / GIB / row.published_gb, stage.allocated_bytes / GIB / row.published_gb
