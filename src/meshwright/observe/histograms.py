"""histograms.jsonl: magnitudes of activations and gradients, counted by power of two at intervals.

The counts show whether a tensor fits into fp8: how much of it is below the smallest number of a format, how
much is above its largest one, and how far apart its magnitudes are. Imports no torch.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, get_args

import numpy as np
from numpy.typing import NDArray

from meshwright.files import regular_file
from meshwright.observe.json_lines import row_of_step
from meshwright.observe.metrics import json_value
from meshwright.observe.step_lines import StepLines

HISTOGRAMS_NAME = "histograms.jsonl"
LOWEST_EXPONENT, HIGHEST_EXPONENT = -64, 31
"""Bins: magnitudes in [2^e, 2^(e + 1)); smaller and larger ones are counted in the bins at the ends."""
MAX_LINE_BYTES = 16 << 20
NUM_BINS = HIGHEST_EXPONENT - LOWEST_EXPONENT + 1

Kind = Literal["activation", "output_gradient", "weight_gradient"]
KINDS: tuple[str, ...] = get_args(Kind)
Counts = NDArray[np.int64]


class Fp8Format(NamedTuple):
    """The range of an fp8 format."""

    name: str
    zero_exponent: int
    """Magnitudes below 2^this are rounded to zero: half of the smallest subnormal."""
    largest: float


E4M3 = Fp8Format("e4m3", -10, 448.0)
E5M2 = Fp8Format("e5m2", -17, 57344.0)
FORMAT_OF: dict[str, Fp8Format] = {"activation": E4M3, "output_gradient": E5M2, "weight_gradient": E5M2}
"""The format in which fp8 recipes keep a tensor of each kind; weight gradients are never kept in fp8."""


class Place(NamedTuple):
    """What a histogram is of."""

    kind: str
    """activation: the input of a matmul; output_gradient: the gradient of its output; weight_gradient."""
    layer: int | None
    """None: the embedding or the head."""
    name: str
    """The matmul, such as attention.qkv or mlp.down."""


@dataclass(frozen=True)
class Histogram:
    """Magnitudes of one tensor over all ranks and micro-batches of a step."""

    counts: Counts
    """Elements by exponent, from LOWEST_EXPONENT on; zeros and non-finite ones are not in it."""
    zeros: int
    not_finite: int
    above_e4m3: int
    """Finite elements above 448."""
    above_e5m2: int
    """Finite elements above 57344."""
    amax: float
    """The largest finite magnitude."""

    @classmethod
    def of_row(cls, row: Counts, amax: float) -> Self:
        """From the counts of all bins followed by zeros, not_finite, above_e4m3 and above_e5m2."""
        zeros, not_finite, above_e4m3, above_e5m2 = (int(value) for value in row[NUM_BINS:])
        return cls(row[:NUM_BINS], zeros, not_finite, above_e4m3, above_e5m2, amax)

    @property
    def num_elements(self) -> int:
        """All elements."""
        return int(self.counts.sum()) + self.zeros + self.not_finite

    @property
    def zero_share(self) -> float:
        """Share of elements that are exactly zero."""
        return self.zeros / max(1, self.num_elements)

    def underflow_share(self, form: Fp8Format) -> float:
        """Share of elements that are not zero, and would be in this format without a scale."""
        below = int(self.counts[: form.zero_exponent - LOWEST_EXPONENT].sum())
        return below / max(1, self.num_elements)

    def overflow_share(self, form: Fp8Format) -> float:
        """Share of finite elements above the largest number of this format, without a scale."""
        above = self.above_e4m3 if form is E4M3 else self.above_e5m2
        return above / max(1, self.num_elements)

    def scaled_underflow_share(self, form: Fp8Format) -> float:
        """The share that underflows where one scale maps amax to the format's largest number.

        The bin in which the limit lies counts in proportion to the part of it (in exponents) below.
        """
        if not self.amax > 0.0:
            return 0.0
        limit = form.zero_exponent + math.log2(self.amax / form.largest) - LOWEST_EXPONENT
        whole = min(max(math.floor(limit), 0), NUM_BINS - 1)
        below = float(self.counts[:whole].sum()) + max(0.0, limit - whole) * float(self.counts[whole])
        return below / max(1, self.num_elements)

    def __add__(self, other: "Histogram") -> "Histogram":
        return Histogram(
            self.counts + other.counts,
            self.zeros + other.zeros,
            self.not_finite + other.not_finite,
            self.above_e4m3 + other.above_e4m3,
            self.above_e5m2 + other.above_e5m2,
            max(self.amax, other.amax),
        )


Histograms = dict[Place, Histogram]


def total(histograms: Sequence[Histogram]) -> Histogram:
    """All histograms as one; at least one is given."""
    first, *rest = histograms
    return sum(rest, start=first)


class HistogramWriter(StepLines):
    """Appends to histograms.jsonl, on rank 0 only. Use as a context."""

    def __init__(self, run_dir: Path | str, *, restored_step: int = 0) -> None:
        super().__init__(Path(run_dir) / HISTOGRAMS_NAME, restored_step=restored_step)

    def write(self, step: int, histograms: Histograms) -> None:
        """Append the line of one step."""
        self.append({"step": step, "histograms": [_row(place, one) for place, one in histograms.items()]})


def _row(place: Place, one: Histogram) -> dict[str, Any]:
    used = np.flatnonzero(one.counts)
    first, last = (int(used[0]), int(used[-1])) if len(used) else (0, -1)
    return {
        **place._asdict(),
        "first_exponent": first + LOWEST_EXPONENT,
        "counts": one.counts[first : last + 1].tolist(),
        "zeros": one.zeros,
        "not_finite": one.not_finite,
        "above_e4m3": one.above_e4m3,
        "above_e5m2": one.above_e5m2,
        "amax": json_value(float(f"{one.amax:.6g}")),
    }


class HistogramStep(NamedTuple):
    """The histograms of one step."""

    step: int
    histograms: Histograms


class HistogramIndex:
    """Where the line of each step is in a histograms.jsonl; lines are parsed when they are asked for.

    The last line of a step counts. A missing or unreadable file has no steps.
    """

    def __init__(self, run_dir: Path | str) -> None:
        self._path = Path(run_dir) / HISTOGRAMS_NAME
        self._places = dict(_line_places(self._path))

    @property
    def steps(self) -> list[int]:
        """The steps that have histograms, in order."""
        return sorted(self._places)

    def read(self, step: int) -> Histograms:
        """The histograms of a step; none where its line is damaged."""
        offset, length = self._places[step]
        try:
            with regular_file(self._path) as file:
                file.seek(offset)
                found = _parse(file.read(length))
        except OSError:
            return {}
        return {} if found is None or found.step != step else found.histograms


def read_histograms(run_dir: Path | str) -> list[HistogramStep]:
    """All steps in order; damaged lines are skipped."""
    index = HistogramIndex(run_dir)
    found = (HistogramStep(step, index.read(step)) for step in index.steps)
    return [one for one in found if one.histograms]


_LINE_START = re.compile(rb'\{"step": (\d{1,15}), ')


def _line_places(path: Path) -> Iterator[tuple[int, tuple[int, int]]]:
    """(step, (offset, length)) of each complete line of no more than MAX_LINE_BYTES."""
    offset = 0
    try:
        with regular_file(path) as file:
            while line := file.readline(MAX_LINE_BYTES):
                begin = _LINE_START.match(line)
                if begin and line.endswith(b"\n"):
                    yield int(begin[1]), (offset, len(line))
                offset += len(line)
    except OSError:
        return


def _parse(line: bytes) -> HistogramStep | None:
    row = row_of_step(line)
    if row is None or not isinstance(row.get("histograms"), list):
        return None
    try:
        return HistogramStep(row["step"], dict(_parsed(one) for one in row["histograms"]))
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def _parsed(row: dict[str, Any]) -> tuple[Place, Histogram]:
    kind, layer, name = row["kind"], row["layer"], str(row["name"])[:200]
    first, found = row["first_exponent"] - LOWEST_EXPONENT, np.array(row["counts"], np.int64)
    if kind not in KINDS or type(layer) not in (int, type(None)) or not 0 <= first <= NUM_BINS - len(found):
        raise ValueError(f"{kind} of layer {layer}")
    counts = np.zeros(NUM_BINS + 4, np.int64)
    counts[first : first + len(found)] = found
    counts[NUM_BINS:] = [row[key] for key in ("zeros", "not_finite", "above_e4m3", "above_e5m2")]
    return Place(kind, layer, name), Histogram.of_row(counts, float(row["amax"]))


def names_of(histograms: Iterable[Place], kind: str) -> list[str]:
    """The matmuls that have histograms of a kind, in their order."""
    return list(dict.fromkeys(place.name for place in histograms if place.kind == kind))
