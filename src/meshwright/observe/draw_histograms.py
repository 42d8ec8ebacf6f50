"""The histograms of a run as text, as a picture, and as figures for scripts."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from meshwright import svg
from meshwright.errors import DataError, SpecError
from meshwright.observe.histograms import (
    FORMAT_OF,
    HISTOGRAMS_NAME,
    KINDS,
    LOWEST_EXPONENT,
    Fp8Format,
    Histogram,
    HistogramIndex,
    names_of,
)
from meshwright.observe.run_files import require_run
from meshwright.spec.violations import nearest

TITLES = {
    "activation": "inputs of the matmul",
    "output_gradient": "gradients of the matmul's output",
    "weight_gradient": "weight gradients",
}
_BLOCKS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class HistogramPicture:
    """The histograms of one kind and one matmul at one step, by layer."""

    step: int
    kind: str
    name: str
    layers: dict[int | None, Histogram]

    @property
    def format(self) -> Fp8Format:
        """The fp8 format that recipes use for this kind."""
        return FORMAT_OF[self.kind]

    @property
    def bins(self) -> range:
        """The bins that have elements."""
        used = np.flatnonzero(np.sum([one.counts for one in self.layers.values()], axis=0))
        return range(int(used[0]), int(used[-1]) + 1) if len(used) else range(0)

    @property
    def title(self) -> str:
        """What is drawn."""
        return f"{self.name}, {TITLES[self.kind]}, step {self.step}"


def histogram_pictures(
    run_dir: Path, *, kind: str | None, matmul: str | None, step: int | None
) -> list[HistogramPicture]:
    """The pictures of a run at its newest step, or at that of `step`; None chooses all kinds or matmuls.

    DataError where the run has no histograms, SpecError where it has none of what was asked for.
    """
    require_run(run_dir)
    index = HistogramIndex(run_dir)
    if not index.steps:
        hint = "train with observe.histograms.every_steps=100, say"
        raise DataError(f"the run has no {HISTOGRAMS_NAME}", where=str(run_dir), hint=hint)
    chosen = _one_of("--step", step, index.steps) if step is not None else index.steps[-1]
    found = index.read(chosen)
    kinds = [one for one in KINDS if names_of(found, one)]
    kinds = [_one_of("--kind", kind, kinds)] if kind is not None else kinds
    if matmul is not None:
        _one_of("--matmul", matmul, [name for one in kinds for name in names_of(found, one)])
    return [
        HistogramPicture(
            chosen,
            one,
            name,
            {place.layer: each for place, each in found.items() if (place.kind, place.name) == (one, name)},
        )
        for one in kinds
        for name in names_of(found, one)
        if matmul in (None, name)
    ]


def _one_of(option: str, given: Any, known: list[Any]) -> Any:
    if given in known:
        return given
    shown = ", ".join(str(one) for one in dict.fromkeys(known[-12:]))
    hint = f"{nearest(str(given), map(str, known))} the run has {shown}".strip()
    raise SpecError(f"there are no histograms of {option[2:]} {given}", where=option, hint=hint)


def draw_text(picture: HistogramPicture) -> Table:
    """One row per layer: its figures, and its exponents as bars."""
    form, bins = picture.format, picture.bins
    first, last = (bins[0] + LOWEST_EXPONENT, bins[-1] + LOWEST_EXPONENT + 1) if bins else (0, 0)
    table = Table(title=picture.title, title_justify="left", box=None, pad_edge=False, title_style="bold")
    table.add_column("layer", justify="right")
    for name in ("largest", "zero", f"< {form.name}", f"> {form.name}", "< scaled"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column(f"2^{first} to 2^{last}", no_wrap=True)
    for layer, one in picture.layers.items():
        shares = [one.zero_share, one.underflow_share(form), one.overflow_share(form)]
        shares.append(one.scaled_underflow_share(form))
        cells = ["-" if layer is None else str(layer), f"{one.amax:.3g}", *map(_percent, shares)]
        table.add_row(*cells, Text(_bars(one, bins), style="cyan"))
    return table


def _percent(share: float) -> str:
    return "0" if share == 0 else "< 0.1%" if share < 5e-4 else f"{100 * share:.1f}%"


def _bars(one: Histogram, bins: range) -> str:
    """One character per bin; a bin with any element is not blank."""
    most = max(1, int(one.counts.max(initial=0)))
    return "".join(_BLOCKS[math.ceil(8 * math.sqrt(int(one.counts[bin]) / most))] for bin in bins)


def draw_svg(pictures: list[HistogramPicture]) -> str:
    """A heat map of layer and exponent for each picture, below each other."""
    parts, top = list[str](), 0.0
    for picture in pictures:
        drawn, height = _heat_map(picture, top)
        parts += drawn
        top += height
    return svg.document(parts, 760, top + 10, label="magnitudes of activations and gradients")


_LEFT, _WIDTH, _ROW = 70.0, 660.0, 16.0


def _heat_map(picture: HistogramPicture, top: float) -> tuple[list[str], float]:
    """The parts of one heat map, and its height."""
    bins, begin = picture.bins, top + 40
    x = svg.Scale(bins.start + LOWEST_EXPONENT, bins.stop + LOWEST_EXPONENT, _LEFT, _LEFT + _WIDTH)
    parts = [svg.text(16, top + 26, picture.title, size=14, weight=600)]
    end = begin + _ROW * len(picture.layers)
    most = max((one.counts.max() / max(1, one.num_elements) for one in picture.layers.values()), default=0.0)
    parts.append(svg.rect(_LEFT, begin, _WIDTH, end - begin, fill="empty"))
    for row, (layer, one) in enumerate(picture.layers.items()):
        y = begin + _ROW * row
        name = "-" if layer is None else str(layer)
        parts.append(svg.text(_LEFT - 8, y + 12, name, size=11, fill="soft", anchor="end"))
        for bin in bins:
            share = float(one.counts[bin]) / max(1, one.num_elements)
            if share:
                left, exponent = x.place(bin + LOWEST_EXPONENT), bin + LOWEST_EXPONENT
                wide, strength = x.place(exponent + 1) - left, round(math.sqrt(share / most), 3)
                tip = f"layer {name}, 2^{exponent}: {100 * share:.3g}%"
                style = {"fill": svg.PALETTE[0], "fill_opacity": strength}
                parts.append(svg.rect(left, y, wide + 0.3, _ROW, title=tip, **style))
    ends = (float(picture.format.zero_exponent), math.log2(picture.format.largest))
    for exponent in ends:
        if bins and x.low < exponent < x.high:
            across = x.place(exponent)
            dashed = {"stroke": "limit", "stroke_width": 1.5, "stroke_dasharray": svg.DASHES}
            parts.append(svg.line((across, begin), (across, end), **dashed))
    ticks = [tick for tick in range(-64, 33, 4) if bins and x.low <= tick <= x.high]
    parts += svg.Plot(x, svg.Scale(0, 1, end, begin)).x_labels(ticks, lambda tick: f"2^{tick:g}")
    return parts, end - top + 34


def to_json(picture: HistogramPicture) -> dict[str, Any]:
    """Figures and counts of each layer."""
    form = picture.format
    return {
        "step": picture.step,
        "kind": picture.kind,
        "matmul": picture.name,
        "format": form.name,
        "layers": [
            {
                "layer": layer,
                "amax": one.amax,
                "zero_share": one.zero_share,
                "underflow_share": one.underflow_share(form),
                "overflow_share": one.overflow_share(form),
                "scaled_underflow_share": one.scaled_underflow_share(form),
                "first_exponent": picture.bins.start + LOWEST_EXPONENT,
                "counts": [int(one.counts[bin]) for bin in picture.bins],
            }
            for layer, one in picture.layers.items()
        ],
    }
