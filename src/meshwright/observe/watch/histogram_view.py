"""Histograms of a run as the live page draws them: layer by exponent at a step, and exponents over steps."""

from typing import Any

import numpy as np

from meshwright.observe.histograms import (
    FORMAT_OF,
    KINDS,
    LOWEST_EXPONENT,
    Fp8Format,
    Histogram,
    HistogramIndex,
    Histograms,
    names_of,
    total,
)

MAX_STEPS = 60
"""Steps of the picture over time: a line of a large model has some 150 KB, and is parsed for each."""


def histogram_view(
    index: HistogramIndex,
    *,
    kind: str = "",
    name: str = "",
    step: int | None = None,
    layer: int | None = None,
) -> dict[str, Any] | None:
    """Shares of elements by exponent, of one kind and one matmul; None where there are no histograms.

    What is not given, or does not exist, is chosen: the newest step, the first kind and its first matmul.
    """
    steps = index.steps
    if not steps:
        return None
    step = step if step in steps else steps[-1]
    newest = index.read(step)
    kinds = {one: names for one in KINDS if (names := names_of(newest, one))}
    if not kinds:
        return None
    kind = kind if kind in kinds else next(iter(kinds))
    name = name if name in kinds[kind] else kinds[kind][0]
    layers = _layers(newest, kind, name)
    shown = [steps[at] for at in np.unique(np.linspace(0, len(steps) - 1, MAX_STEPS).astype(int))]
    over_steps = [_of_layers(index.read(one), kind, name, layer) for one in shown]
    first, last = _used([*layers.values(), *(one for one in over_steps if one is not None)])
    form = FORMAT_OF[kind]
    return {
        "kinds": kinds,
        "kind": kind,
        "name": name,
        "step": step,
        "all_steps": steps[-2000:],
        "first_exponent": first + LOWEST_EXPONENT,
        "layers": [_figures(number, one, form) for number, one in layers.items()],
        "layer_shares": [_shares(one, first, last) for one in layers.values()],
        "steps": shown,
        "step_shares": [None if one is None else _shares(one, first, last) for one in over_steps],
        "layer": layer if layer in layers else None,
        "format": {
            "name": form.name,
            "zero_exponent": form.zero_exponent,
            "largest_exponent": float(np.log2(form.largest)),
        },
    }


def _layers(histograms: Histograms, kind: str, name: str) -> dict[int | None, Histogram]:
    return {
        place.layer: one for place, one in histograms.items() if place.kind == kind and place.name == name
    }


def _of_layers(histograms: Histograms, kind: str, name: str, layer: int | None) -> Histogram | None:
    """One layer's histogram, or that of all layers; None where the step does not have it."""
    found = _layers(histograms, kind, name)
    chosen = [found[layer]] if layer in found else list(found.values())
    return total(chosen) if chosen else None


def _used(histograms: list[Histogram]) -> tuple[int, int]:
    """The first and the last bin that has elements."""
    bins = np.flatnonzero(np.sum([one.counts for one in histograms], axis=0))
    return (int(bins[0]), int(bins[-1])) if len(bins) else (-LOWEST_EXPONENT, -LOWEST_EXPONENT)


def _shares(one: Histogram, first: int, last: int) -> list[float]:
    shares = one.counts[first : last + 1] / max(1, one.num_elements)
    return [float(f"{share:.3g}") for share in shares.tolist()]


def _figures(layer: int | None, one: Histogram, form: Fp8Format) -> dict[str, Any]:
    """What the page says of one layer."""
    return {
        "layer": layer,
        "zero": one.zero_share,
        "underflow": one.underflow_share(form),
        "overflow": one.overflow_share(form),
        "scaled_underflow": one.scaled_underflow_share(form),
        "not_finite": one.not_finite,
        "amax": one.amax,
    }
