"""Writes the planner's table of block memory from traces: `python -m meshwright.rehearse.block_table`.

Every kind of block (block_kinds.py) is traced and read (block_reading.py). Of the points of a phase those are
written that are the peak for some sizes; the rest can never decide.
"""

import argparse
import contextlib
import gc
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib import resources
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.errors import SpecError
from meshwright.hardware.machine import usable_cores
from meshwright.plan.memory.block_table import SECTIONS, core_mode, section_of, show_terms
from meshwright.plan.memory.dims import MONOMIALS, Dims, evaluate
from meshwright.rehearse.block_kinds import (
    PAIRS,
    SPLIT_BLOCK,
    Kind,
    is_split_backward,
    kinds,
    run_of,
    split_run_of,
    traced_rank,
)
from meshwright.rehearse.block_reading import Point, Reading, Terms, Units, add, read_block, read_split
from meshwright.rehearse.parallel_traces import init_worker
from meshwright.rehearse.trace import trace_rank

NUM_SIZES = 400
_SUMS = {
    "kept": "kept",
    "casts": "kept_casts",
    "remembered": "remembered",
    "between": "between",
    "leftover": "leftover",
}


def table_path() -> Path:
    """Where the planner reads the table."""
    return Path(str(resources.files("meshwright.plan.memory").joinpath("block_table.json")))


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Without garbage collections: one may come in the midst of a phase, at another place in each process."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@_without_collections()
def read_kind(kind: Kind) -> Reading | None:
    """Trace one kind of block and read it; None where torch's compiler passes over it on this machine."""
    run = run_of(kind)
    try:
        trace = trace_rank(run, traced_rank(run), num_steps=1, by_part=True)
    except SpecError:
        if not kind.mode.compiled:
            raise
        return None
    if kind.mode.compiled and not trace.num_graphs:
        return None
    found = read_block(trace, Units(run))
    if not is_split_backward(kind):
        return found
    split = split_run_of(kind)
    try:
        trace = trace_rank(split, traced_rank(split), num_steps=1, by_part=True)
    except SpecError:  # FSDP2 does not reduce the gradients of some blocks after a split backward
        return found
    return read_split(trace, Units(split), SPLIT_BLOCK, found)


def build_table(readings: Mapping[Kind, Reading | None]) -> dict[str, Any]:
    """The file's content: sections by mode; null for one that torch's compiler passes over."""
    modes: dict[str, Any] = {}
    for kind, reading in readings.items():
        mode = modes.setdefault(str(kind.mode), {section: {} for section in SECTIONS})
        for section, found in sections_of(kind, reading, readings.get(plain_kind(kind))).items():
            mode[section].update(found)
    return {"modes": modes}


def plain_kind(kind: Kind) -> Kind:
    """The kind whose core is the plain one."""
    return kind._replace(core="plain")


def sections_of(kind: Kind, reading: Reading | None, plain: Reading | None) -> dict[str, dict[str, Any]]:
    """What one kind adds to the table, by section and name; `plain` is the reading of `plain_kind`."""
    if reading is None:
        return {"mlp": {kind.mlp: None}} if kind.core == "plain" else {"core": {_core_name(kind): None}}
    if kind.core != "plain":
        assert plain is not None
        return {"core": {_core_name(kind): _section(_moved_to_core(reading, plain), "core")}}
    found: dict[str, dict[str, Any]] = {"mlp": {kind.mlp: _section(reading, "mlp")}}
    is_first = next(pair for pair in PAIRS if pair[0] == kind.attention)[1] == kind.mlp
    if is_first:
        found["attention"] = {kind.attention: _section(reading, "attention")}
    if is_first and kind.mode == core_mode(kind.mode) and kind.attention in ("gqa", "latent"):
        found["core"] = {_core_name(kind): _section(reading, "core")}
    return found


def _core_name(kind: Kind) -> str:
    return f"latent_{kind.core}" if kind.attention == "latent" else kind.core


def _moved_to_core(reading: Reading, plain: Reading) -> Reading:
    """The reading in which the core has what it changes of the other sections.

    A core that gathers keys does not save those that attention has made.
    """

    def moved(found: Mapping[str, Terms], before: Mapping[str, Terms]) -> dict[str, Terms]:
        others = [section for section in found if section != "core"]
        changes = [_difference(found[section], before.get(section, {})) for section in others]
        kept = {section: before[section] for section in others}
        return {"core": _sum(found.get("core", {}), *changes), **kept}

    points: dict[str, list[Point]] = {}
    for phase, listed in reading.points.items():
        before = peaks(plain.points[phase])[0].live if phase in plain.points else {}
        is_own = section_of(phase) == "core"
        chosen = listed if is_own else peaks(listed)[:1]
        points[phase] = [one._replace(live=moved(one.live, {**_NOTHING, **before})) for one in chosen]
    sums = {
        name: moved(getattr(reading, name), getattr(plain, name)) if getattr(plain, name) else {}
        for name in ("kept", "between", "leftover")
    }
    return reading._replace(points=points, **sums)


_NOTHING: dict[str, Terms] = {section: {} for section in SECTIONS}


def _difference(one: Terms, other: Terms) -> Terms:
    found = dict(one)
    add(found, other, -1.0)
    return found


def _section(reading: Reading, section: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        name: show_terms(getattr(reading, part)[section])
        for name, part in _SUMS.items()
        if getattr(reading, part).get(section)
    }
    own = {phase: section_of(phase) == section for phase in reading.points}
    found["points"] = {
        phase: [_text(one, section) for one in peaks(listed)]
        for phase, listed in reading.points.items()
        if own[phase] and listed
    }
    found["standing"] = {
        phase: [show_terms(largest.live[section]), show_terms(largest.gradients[section])]
        for phase, listed in reading.points.items()
        if not own[phase] and listed
        for largest in [peaks(listed)[0]]
        if largest.live[section] or largest.gradients[section]
    }
    found["arrivals"] = [
        [phase.partition("/")[2], *_text(one, section)]
        for phase, listed in reading.points.items()
        if own[phase] and phase.startswith("backward")
        for one in listed
        if one.arriving
    ]
    return found


def _text(point: Point, section: str) -> list[str]:
    terms = (point.live[section], point.gradients[section], point.arriving)
    texts = [show_terms(one) for one in terms]
    while texts and not texts[-1]:
        texts.pop()
    return texts or [""]


def peaks(points: Sequence[Point]) -> list[Point]:
    """The points that are fullest for some sizes, with and without gradients; the most frequent first."""
    sizes = _sizes()
    columns = {name: evaluate(name, sizes) for name in MONOMIALS}

    def values(terms: Sequence[Terms]) -> np.ndarray:
        rows = [sum((columns[n] * v for n, v in one.items()), np.zeros(NUM_SIZES)) for one in terms]
        return np.stack(rows)

    live = values([_sum(*one.live.values()) for one in points])
    first = live + values([_sum(*one.gradients.values()) for one in points])
    later = live + values([one.arriving for one in points])
    counts: dict[int, int] = {}
    for totals in (first, later):
        for index in totals.argmax(axis=0):
            counts[int(index)] = counts.get(int(index), 0) + 1
    chosen = sorted(counts, key=lambda index: -counts[index])
    return [points[index] for index in chosen if counts[index] >= 2 or index == chosen[0]]


def _sum(*parts: Terms) -> Terms:
    found: Terms = {}
    for part in parts:
        add(found, part)
    return found


def _sizes() -> Dims:
    """Dims of models and layouts as they are trained, drawn once and for all."""
    draw = np.random.default_rng(20261115)

    def choice(*values: float) -> np.ndarray:
        return draw.choice(np.asarray(values, dtype=float), NUM_SIZES)

    width, tp, cp = choice(1024, 2048, 4096, 8192), choice(1, 1, 2, 4, 8), choice(1, 1, 2, 4)
    heads, group = width / 128, choice(1, 2, 4, 8)
    sequences, length = choice(1, 1, 2, 4), choice(2048, 4096, 8192, 32768)
    tokens = sequences * length / cp
    rows = tokens / tp
    expert, experts = width * choice(0.25, 0.5, 1, 2), choice(8, 64, 128)
    return {
        "T": tokens,
        "t": rows,
        "B": sequences,
        "S": length,
        "cp": cp,
        "D": width,
        "HK": width / tp,
        "GK": width / group / tp,
        "H": heads / tp,
        "G": heads / group / tp,
        "K": choice(64, 128),
        "F": width * choice(2.5, 3.5, 4) / tp,
        "U": expert / tp,
        "E": experts,
        "M": expert,
        "n": rows * choice(2, 4, 8),
        "EDM": experts * width * expert / choice(1, 4, 8),
        "Q": choice(768, 1536),
        "C": choice(256, 512),
        "R": choice(64.0),
        "HN": width / tp,
        "HP": width / tp,
        "W": sequences * np.minimum(length / cp / 2, 2048) * length / cp / 2,
        "w": np.minimum(length / cp / 2, 2048) * length / cp / 2,
    }


def text_of(table: Mapping[str, Any]) -> str:
    """The file: sorted, a line for each point."""
    return json.dumps(table, indent=1, sort_keys=True) + "\n"


def read_kinds(chosen: Sequence[Kind]) -> dict[Kind, Reading | None]:
    """Read kinds in one process for each core; None where torch's compiler passes over one."""
    found: dict[Kind, Reading | None] = {}
    context = get_context("spawn")
    with ProcessPoolExecutor(usable_cores(), mp_context=context, initializer=init_worker) as pool:
        for number, (kind, reading) in enumerate(zip(chosen, pool.map(read_kind, chosen), strict=True), 1):
            print(f"{number}/{len(chosen)} {kind}{'' if reading else ': not compiled here'}", flush=True)
            found[kind] = reading
    return found


def main() -> None:
    """Trace every kind of block and write the planner's table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--only", default="", help="replace only kinds whose name holds this text")
    chosen = [kind for kind in kinds() if parser.parse_args().only in str(kind)]
    chosen = list(dict.fromkeys([*map(plain_kind, chosen), *chosen]))
    table = json.loads(table_path().read_text()) if len(chosen) < len(list(kinds())) else {"modes": {}}
    for mode, sections in build_table(read_kinds(chosen))["modes"].items():
        stored = table["modes"].setdefault(mode, {section: {} for section in SECTIONS})
        for section, named in sections.items():
            stored[section].update(named)
    table_path().write_text(text_of(table))


if __name__ == "__main__":
    main()
