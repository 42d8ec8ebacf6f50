"""What bench/parity.py found, as a verdict, JSON, a page and a picture."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshwright.plan.draw.charts import PALETTE

WIDTH, PANEL, LEFT, RIGHT, GAP = 940, 250, 60, 150, 40
LAST_SHARE = 0.2
# In which kinds are shown.
ORDER = ("bf16", "fp32", "current", "delayed", "blocks", "mxfp8", "control")
STYLE = "<style>text{font:12px sans-serif;fill:#333}path{fill:none;stroke-width:1.6}</style>"


@dataclass(frozen=True)
class Curve:
    """One run."""

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
    """A kind minus bf16 with the same seed, over the seeds."""

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
    """One kind beside bf16 of the same seeds."""

    kind: str
    last: float
    last_gap: Gap
    held_out: float
    held_out_gap: Gap
    is_inside: bool


def spread(curves: Sequence[Curve]) -> tuple[float, float]:
    """Largest minus smallest over the seeds of bf16: of the last losses, and on held-out data."""
    ours = [curve for curve in curves if curve.kind == "bf16"]
    lasts, held = [curve.last for curve in ours], [curve.held_out for curve in ours]
    return max(lasts) - min(lasts), max(held) - min(held)


def judge(curves: Sequence[Curve]) -> list[Verdict]:
    """Each kind: mean over seeds of the difference to bf16 with the same seed, against the spread."""
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
                # Not a number is never inside.
                is_inside=abs(last_gap.mean) <= last_spread and abs(held_gap.mean) <= held_spread,
            )
        )
    return verdicts


def write_results(curves: list[Curve], facts: dict[str, Any], folder: Path, *, name: str) -> bool:
    """Write everything; True when all kinds are inside the spread and the control is outside."""
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
    """What came out, a line for each kind."""
    last_spread, held_spread = spread(curves)
    lines = [f"spread of bf16 over seeds: {last_spread:.4f} (last fifth), {held_spread:.4f} (held out)"]
    for verdict in judge(curves):
        where = "inside" if verdict.is_inside else "outside"
        should = "outside" if verdict.kind == "control" else "inside"
        lines.append(
            f"{verdict.kind:8} last fifth {verdict.last_gap}, held out {verdict.held_out_gap}: {where} the "
            f"spread, {'as it should be' if where == should else 'WRONG: it should be ' + should}"
        )
    return lines


def show(curves: list[Curve], verdicts: list[Verdict], facts: dict[str, Any], *, picture: str) -> str:
    """The page."""
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
            f"Runs: {counts}. `fp32` multiplies in TF32 on a GPU.",
            "",
            f"The text is {facts['num_files']} files of the sources of Python {facts['python']}'s library, "
            f"{facts['num_bytes'] / 1e6:.2f} MB, bytes as tokens. Who knows nothing but the frequencies of "
            f"bytes has a loss of {facts['frequencies']:.3f}.",
            "",
            "The rule, which was fixed before the runs: a seed is initial weights and the order of samples; "
            "the text and its held-out part are the same for all. A kind's gap is its loss minus that of "
            "bf16 with the same seed, averaged over the seeds: over the last fifth of the steps, and on "
            "held-out data. It is inside when both are no larger than the spread of bf16, its largest loss "
            "over its seeds minus its smallest. The control (E5M2 everywhere, the ends too, with scales far "
            "too large) has to be outside, or the rule could not tell anything.",
            "",
            f"Spread of bf16: {last_spread:.4f} (last fifth), {held_spread:.4f} (held out). Beside a mean "
            "gap stand its smallest and its largest over the seeds.",
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
    """Means of runs of `window` steps, at their last step."""
    return [
        (float(end), statistics.fmean(losses[end - window : end]))
        for end in range(window, len(losses) + 1, window)
    ]


def draw(curves: list[Curve]) -> str:
    """Two panels over the steps: the losses, and what each is above bf16 of its seed."""
    kinds = list(dict.fromkeys(curve.kind for curve in curves))
    shade = dict(zip(kinds, PALETTE, strict=False))
    window = max(1, len(curves[0].losses) // 50)
    base = {curve.seed: smoothed(curve.losses, window) for curve in curves if curve.kind == "bf16"}
    losses = [(shade[curve.kind], smoothed(curve.losses, window)) for curve in curves]
    gaps = [
        (colour, [(x, y - z) for (x, y), (_, z) in zip(points, base[curve.seed], strict=True)])
        for curve, (colour, points) in zip(curves, losses, strict=True)
        if curve.kind not in ("bf16", "control") and curve.seed in base
    ]
    parts = _panel(losses, top=20, words="loss")
    if gaps:
        parts += _panel(gaps, top=20 + PANEL + GAP, words="loss minus that of bf16, same seed")
    for index, kind in enumerate(kinds):
        y = 30 + 20 * index
        parts.append(
            f'<path d="M{WIDTH - RIGHT + 14} {y - 4}h24" stroke="{shade[kind]}"/>'
            f'<text x="{WIDTH - RIGHT + 44}" y="{y}">{kind}</text>'
        )
    height = 2 * PANEL + GAP + 50
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}">{STYLE}'
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>{"".join(parts)}</svg>\n'
    )


def _panel(lines: list[tuple[str, list[tuple[float, float]]]], *, top: float, words: str) -> list[str]:
    ys = [y for _, points in lines for _, y in points if y == y]
    low, high = min(ys), max(ys)
    high = high if high > low else low + 1.0
    last = max(x for _, points in lines for x, _ in points)
    across, up = (WIDTH - LEFT - RIGHT) / last, PANEL / (high - low)
    parts = [f'<text x="{LEFT}" y="{top - 6}">{words}</text>']
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        value, y = low + share * (high - low), top + PANEL * (1 - share)
        parts.append(
            f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>'
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>'
        )
        x = LEFT + share * last * across
        parts.append(
            f'<text x="{x:.1f}" y="{top + PANEL + 16}" text-anchor="middle">{share * last:.0f}</text>'
        )
    for colour, points in lines:
        places = [f"{LEFT + x * across:.1f} {top + PANEL - (y - low) * up:.1f}" for x, y in points if y == y]
        parts.append(f'<path d="M{"L".join(places)}" stroke="{colour}"/>')
    return parts
