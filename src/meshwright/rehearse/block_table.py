"""Writes the planner's table of block memory from traces: `python -m meshwright.rehearse.block_table`.

Every kind of block (block_kinds.py) is traced and read (block_reading.py). Of the points of a phase those are
written that are the peak for some sizes; the rest can never decide.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.errors import SpecError
from meshwright.plan.memory.block_table import show_terms
from meshwright.plan.memory.dims import MONOMIALS, Dims, evaluate
from meshwright.rehearse.block_kinds import PLAIN_ATTENTION, PLAIN_MLP, Kind, kinds, run_of, traced_rank
from meshwright.rehearse.block_reading import Point, Reading, Terms, Units, add, read_block
from meshwright.rehearse.trace import trace_rank

OWN_PHASES = {
    "attention": ("forward/attention", "recompute/attention", "backward/attention"),
    "mlp": ("forward/mlp", "backward/mlp"),
}
STANDING_PHASES = {"attention": ("forward/mlp", "backward/mlp"), "mlp": ("backward/attention",)}
NUM_SIZES = 400


def table_path() -> Path:
    """Where the planner reads the table."""
    return Path(str(resources.files("meshwright.plan.memory").joinpath("block_table.json")))


def read_kind(kind: Kind) -> Reading | None:
    """Trace one kind of block and read it; None where torch's compiler passes over it on this machine."""
    run = run_of(kind)
    try:
        trace = trace_rank(run, traced_rank(run), num_steps=1, by_half=True)
    except SpecError:
        if not kind.mode.compiled:
            raise
        return None
    if kind.mode.compiled and not trace.num_graphs:
        return None
    return read_block(trace, Units(run))


def build_table(readings: Mapping[Kind, Reading]) -> dict[str, Any]:
    """The file's content: halves by mode."""
    modes: dict[str, Any] = {}
    for kind, reading in readings.items():
        mode = modes.setdefault(str(kind.mode), {"attention": {}, "mlp": {}})
        for half, found in halves_of(kind, reading).items():
            mode[half].update(found)
    return {"modes": modes}


def halves_of(kind: Kind, reading: Reading) -> dict[str, dict[str, Any]]:
    """The halves of one kind that belong into the table, by `attention` and `mlp`."""
    found = {}
    if kind.mlp == PLAIN_MLP:
        found["attention"] = {kind.attention: _half(reading, "attention")}
    if kind.attention == PLAIN_ATTENTION:
        found["mlp"] = {kind.mlp: _half(reading, "mlp")}
    return found


def _half(reading: Reading, half: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        name: show_terms(getattr(reading, part)[half])
        for name, part in (("kept", "kept"), ("casts", "kept_casts"), ("remembered", "remembered"))
        if getattr(reading, part)[half]
    }
    own, backward = OWN_PHASES[half], f"backward/{half}"
    found["points"] = {
        phase: [_own_text(one) for one in peaks(reading.points[phase])]
        for phase in own
        if reading.points.get(phase)
    }
    found["standing"] = {
        phase: [show_terms(largest.other), show_terms(largest.other_gradients)]
        for phase in STANDING_PHASES[half]
        if reading.points.get(phase)
        for largest in [peaks(reading.points[phase])[0]]
    }
    found["arrivals"] = [_own_text(one) for one in reading.points.get(backward, []) if one.arriving]
    return found


def _own_text(point: Point) -> list[str]:
    texts = [show_terms(terms) for terms in (point.own, point.own_gradients, point.arriving)]
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

    live = values([_sum(one.own, one.other) for one in points])
    first = live + values([_sum(one.own_gradients, one.other_gradients) for one in points])
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
    }


def text_of(table: Mapping[str, Any]) -> str:
    """The file: sorted, a line for each point."""
    return json.dumps(table, indent=1, sort_keys=True) + "\n"


def main() -> None:
    """Trace every kind of block and write the planner's table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--only", default="", help="replace only kinds whose name holds this text")
    chosen = [kind for kind in kinds() if parser.parse_args().only in str(kind)]
    table = json.loads(table_path().read_text()) if len(chosen) < len(list(kinds())) else {"modes": {}}
    readings: dict[Kind, Reading] = {}
    for kind in chosen:
        found = read_kind(kind)
        print(f"{kind}{'' if found else ': not compiled here'}")
        if found is not None:
            readings[kind] = found
    for mode, halves in build_table(readings)["modes"].items():
        stored = table["modes"].setdefault(mode, {"attention": {}, "mlp": {}})
        for half, named in halves.items():
            stored[half].update(named)
    table_path().write_text(text_of(table))


if __name__ == "__main__":
    main()
