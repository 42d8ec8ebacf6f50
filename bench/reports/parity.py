"""The results of `bench.parity` as a verdict, JSON, a page and a chart."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshwright import svg
from meshwright.svg import PALETTE, Plot, Point, Scale, round_ticks

WIDTH, PANEL, TOP, LEFT, RIGHT, GAP = 940, 250, 34, 70, 150, 64
LAST_SHARE = 0.2
# Order of the kinds in tables.
ORDER = ("bf16", "fp32", "current", "delayed", "blockwise", "mxfp8", "control")


@dataclass(frozen=True)
class Curve:
    """The losses of one run."""

    kind: str
    seed: int
    losses: list[float]
    held_out: float
    seconds: float

    @property
    def last(self) -> float:
        """Mean loss of the last fifth of the steps."""
        return statistics.fmean(self.losses[-max(1, round(LAST_SHARE * len(self.losses))) :])


@dataclass(frozen=True)
class Gap:
    """Loss of a kind minus that of bf16 with the same seed: mean, lowest and highest over the seeds."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Gap":
        return cls(statistics.fmean(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.mean:+.4f} ({self.low:+.4f} to {self.high:+.4f})"


@dataclass(frozen=True)
class Verdict:
    """One kind against bf16 with the same seeds."""

    kind: str
    last: float
    last_gap: Gap
    held_out: float
    held_out_gap: Gap
    is_inside: bool


def spread(curves: Sequence[Curve]) -> tuple[float, float]:
    """Largest minus smallest loss over the seeds of bf16: over the last steps, and on held-out data."""
    ours = [curve for curve in curves if curve.kind == "bf16"]
    lasts, held = [curve.last for curve in ours], [curve.held_out for curve in ours]
    return max(lasts) - min(lasts), max(held) - min(held)


def judge(curves: Sequence[Curve]) -> list[Verdict]:
    """The verdict on each kind: its mean gap to bf16 against the spread of bf16."""
    base = {curve.seed: curve for curve in curves if curve.kind == "bf16"}
    last_spread, held_spread = spread(curves)
    verdicts = []
    for kind in dict.fromkeys(curve.kind for curve in curves):
        ours = [curve for curve in curves if curve.kind == kind and curve.seed in base]
        if not ours:
            continue
        last_gap = Gap.of([curve.last - base[curve.seed].last for curve in ours])
        held_gap = Gap.of([curve.held_out - base[curve.seed].held_out for curve in ours])
        verdicts.append(
            Verdict(
                kind=kind,
                last=statistics.fmean(curve.last for curve in ours),
                last_gap=last_gap,
                held_out=statistics.fmean(curve.held_out for curve in ours),
                held_out_gap=held_gap,
                # NaN is never inside.
                is_inside=abs(last_gap.mean) <= last_spread and abs(held_gap.mean) <= held_spread,
            )
        )
    return verdicts


def write_results(curves: list[Curve], facts: dict[str, Any], folder: Path, *, name: str) -> bool:
    """Write all files; True when all kinds are inside the spread and the control is outside."""
    if not any(curve.kind == "bf16" for curve in curves):
        return False
    curves = sorted(curves, key=lambda curve: (ORDER.index(curve.kind), curve.seed))
    verdicts = judge(curves)
    is_sound = all(verdict.is_inside == (verdict.kind != "control") for verdict in verdicts)
    device = "".join(c for c in facts["device"].lower().replace("nvidia ", "") if c.isalnum())[:12]
    stem = folder / f"{name}_{device}_{facts['date']}"
    folder.mkdir(parents=True, exist_ok=True)
    document = {"facts": facts, "verdicts": list(map(asdict, verdicts)), "curves": list(map(asdict, curves))}
    stem.with_suffix(".json").write_text(json.dumps(document) + "\n")
    stem.with_suffix(".svg").write_text(draw(curves))
    stem.with_suffix(".md").write_text(show(curves, verdicts, facts, picture=f"{stem.name}.svg"))
    return is_sound


def verdict_lines(curves: Sequence[Curve]) -> list[str]:
    """The verdict as text: one line per kind."""
    last_spread, held_spread = spread(curves)
    lines = [f"spread of bf16 over seeds: {last_spread:.4f} (last fifth), {held_spread:.4f} (held out)"]
    for verdict in judge(curves):
        where = "inside" if verdict.is_inside else "outside"
        should = "outside" if verdict.kind == "control" else "inside"
        lines.append(
            f"{verdict.kind:8} last fifth {verdict.last_gap}, held out {verdict.held_out_gap}: {where} the "
            f"spread, {'as expected' if where == should else 'WRONG: expected ' + should}"
        )
    return lines


def show(curves: list[Curve], verdicts: list[Verdict], facts: dict[str, Any], *, picture: str) -> str:
    """The results page."""
    data, steps = facts["run"]["data"], len(curves[0].losses)
    last_spread, held_spread = spread(curves)
    counts = ", ".join(f"{v.kind} {sum(c.kind == v.kind for c in curves)}" for v in verdicts)
    rows = [
        f"| {v.kind} | {v.last:.4f} | {v.last_gap} | {v.held_out:.4f} | {v.held_out_gap} | "
        f"{'inside' if v.is_inside else '**outside**'} | {_seconds(curves, v.kind):.0f} |"
        for v in verdicts
    ]
    return "\n".join(
        [
            "# Loss parity",
            "",
            f"{facts['device']}, torch {facts['torch']}, {facts['date']}. {facts['run']['model']['family']}, "
            f"{steps} steps of {data['batch_sequences']} x {data['sequence_length']} tokens, each seen once. "
            f"Runs: {counts}. `fp32` computes matmuls in TF32 on a GPU.",
            "",
            f"The text is {facts['num_files']} files of the sources of Python {facts['python']}'s library, "
            f"{facts['num_bytes'] / 1e6:.2f} MB, bytes as tokens. Its unigram entropy is "
            f"{facts['frequencies']:.3f}: the loss of a model that ignores context.",
            "",
            "The rule was fixed before the runs. A seed decides initial weights and the order of samples; "
            "the text and its held-out part are the same for all. The gap of a kind is its loss minus that "
            "of bf16 with the same seed, averaged over the seeds: over the last fifth of the steps, and on "
            "held-out data. A kind is inside when both gaps are no larger than the spread of bf16, its "
            "largest loss over its seeds minus its smallest. The control (E5M2 everywhere, without bf16 "
            "ends, with scales far too large) must be outside, or the rule would show nothing.",
            "",
            f"Spread of bf16: {last_spread:.4f} (last fifth), {held_spread:.4f} (held out). In brackets: "
            "the smallest and the largest gap over the seeds.",
            "",
            "| kind | loss, last fifth | gap | held-out loss | gap | spread | seconds |",
            "|---|---|---|---|---|---|---|",
            *rows,
            "",
            f"![Losses, and their difference to bf16]({picture})",
            "",
        ]
    )


def _seconds(curves: list[Curve], kind: str) -> float:
    return sum(curve.seconds for curve in curves if curve.kind == kind)


def smoothed(losses: Sequence[float], window: int) -> list[tuple[float, float]]:
    """Means over windows of this many steps, at the last step of each."""
    return [
        (float(end), statistics.fmean(losses[end - window : end]))
        for end in range(window, len(losses) + 1, window)
    ]


def draw(curves: list[Curve]) -> str:
    """A chart with two panels over the steps: losses, and their gap to bf16 of the same seed."""
    kinds = list(dict.fromkeys(curve.kind for curve in curves))
    colours = dict(zip(kinds, PALETTE, strict=False))
    window = max(1, len(curves[0].losses) // 50)
    base = {curve.seed: smoothed(curve.losses, window) for curve in curves if curve.kind == "bf16"}
    losses = [(colours[curve.kind], smoothed(curve.losses, window)) for curve in curves]
    gaps = [
        (colour, [(x, y - z) for (x, y), (_, z) in zip(points, base[curve.seed], strict=True)])
        for curve, (colour, points) in zip(curves, losses, strict=True)
        if curve.kind not in ("bf16", "control") and curve.seed in base
    ]
    parts = _panel(losses, top=TOP, title="loss")
    if gaps:
        parts += _panel(gaps, top=TOP + PANEL + GAP, title="loss minus that of bf16, same seed")
    entries = [svg.Entry(kind, colours[kind]) for kind in kinds]
    parts += svg.line_legend(entries, WIDTH - RIGHT + 14, TOP + 8)
    return svg.document(parts, WIDTH, TOP + 2 * PANEL + GAP + 50, label="Losses, and their gap to bf16")


def _panel(lines: list[tuple[str, list[Point]]], *, top: float, title: str) -> list[str]:
    ys = [y for _, points in lines for _, y in points if y == y]
    low, high = min(ys), max(ys)
    high = high if high > low else low + 1.0
    last = max(x for _, points in lines for x, _ in points)
    plot = Plot(Scale(0.0, last, LEFT, WIDTH - RIGHT), Scale(low, high, top + PANEL, top))
    parts = [svg.text(LEFT - 8, top - 12, title, weight=600)]
    parts += plot.grid(round_ticks(low, high), "{:g}".format)
    parts += plot.x_labels(round_ticks(0.0, last), "{:g}".format)
    for colour, points in lines:
        parts.append(plot.line([(x, y) for x, y in points if y == y], colour, width=1.6))
    return parts
