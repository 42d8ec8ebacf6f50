"""One self-contained HTML file about a run: figures, curves, the resolved run. It loads nothing."""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from meshwright.errors import DataError
from meshwright.observe.chart import Chart, Drawing, Points, Series, draw, smooth
from meshwright.observe.events import Event
from meshwright.observe.figures import RunFigures, run_figures
from meshwright.observe.goodput import read_goodput
from meshwright.observe.history import History
from meshwright.observe.metrics import json_value
from meshwright.observe.run_files import RunFiles, read_run
from meshwright.units import show_bytes, show_count, show_seconds

REPORT_NAME = "report.html"
# Fewer steps than this are drawn as they are; more get a smoothed line over a faint one.
_SMOOTH_FROM_STEPS = 60
_MAX_EVENTS = 60
_YAML_KEY = re.compile(r"^(\s*(?:- )?)([A-Za-z_][\w.-]*)(:)", re.MULTILINE)
# The others are in the columns of a line, in its sentence, or for the account of time.
_NO_DETAILS = {"time", "kind", "rank", "host", "text", "began_at"}
_EVENT_SENTENCE = {
    "start": "started",
    "resume": "resumed",
    "change": "changed a setting",
    "checkpoint": "saved a checkpoint",
    "local_checkpoint": "saved a local checkpoint",
    "evaluate": "evaluated",
    "early_stop": "stopped early: the evaluation loss no longer fell",
    "overflow": "skipped an update: gradients overflowed",
    "straggler": "found a rank that is slower than the others",
    "warning": "warning",
    "prediction": "compared with its prediction",
    "upload": "copied a checkpoint to the second place",
    "restart": "restarted all ranks",
    "skip": "skipped an update: the gradients were not finite, or their norm was a spike",
    "rollback": "went back to a checkpoint and skipped the data since",
    "interrupt": "was interrupted",
    "failure": "failed",
    "finish": "finished",
}


class Report(NamedTuple):
    """A report that was written, and the figures in it."""

    path: Path
    figures: RunFigures

    def to_json(self) -> str:
        """The path and the figures as one JSON document."""
        figures = {name: json_value(value) for name, value in asdict(self.figures).items()}
        return json.dumps({"report": str(self.path), **figures}, indent=2)


def write_report(run_dir: Path | str, output: Path | str | None = None) -> Report:
    """Write the report of a run directory. Raises DataError when it is not a run."""
    files = read_run(run_dir)
    path = Path(output) if output else files.run_dir / REPORT_NAME
    path = path / REPORT_NAME if path.is_dir() else path
    if path.exists() and not path.is_file():  # a device or a pipe would be replaced
        raise DataError("this is no regular file", where=str(path), hint="choose a file with -o")
    figures = run_figures(files)
    page = render(files, figures)
    draft = path.with_name(path.name + ".draft")
    try:
        draft.write_text(page, encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        raise DataError(
            f"the report cannot be written: {error.strerror}", where=str(path), hint="choose a file with -o"
        ) from error
    return Report(path, figures)


def render(files: RunFiles, figures: RunFigures) -> str:
    """The page as HTML text."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    drawings = [drawing for drawing in map(draw, charts(files, figures)) if drawing]
    return environment.from_string(_asset("report.html.j2")).render(
        figures=figures,
        subtitle=_subtitle(files),
        tiles=tiles(figures),
        notices=notices(figures),
        drawings=drawings,
        hover=[_hover(drawing) for drawing in drawings],
        changes=figures.changes,
        events=_event_lines(files.events),
        sample=files.sample,
        run_yaml=_coloured_yaml(files.run_text),
        facts=_facts(files),
        absent=files.absent,
        style=Markup(_asset("report.css")),
        script=Markup(_asset("report.js")),
    )


def _asset(name: str) -> str:
    return package_files("meshwright.observe").joinpath(name).read_text(encoding="utf-8")


def charts(files: RunFiles, figures: RunFigures) -> Iterator[Chart]:
    """The charts of the report, one at a time; those without a point are omitted when drawn."""
    history, marks = files.history, [float(step) for step in figures.resumed_at]
    memory_unit, memory = _memory(history)
    yield _loss_chart(history, figures, marks)
    yield Chart(
        title="Reward margin",
        note="Mean reward of chosen answers less that of rejected ones.",
        series=_trend(history, "reward_margin"),
        marks=marks,
        show=_show_small,
    )
    yield Chart(
        title="Reward accuracy",
        note="Share of pairs whose chosen answer has the higher reward.",
        series=_trend(history, "reward_accuracy"),
        marks=marks,
        show=_show_small,
    )
    yield Chart(
        title="Gradient norm", note="Before clipping.", series=_trend(history, "grad_norm"), marks=marks
    )
    yield Chart(title="Learning rate", series=_single(history, "lr"), marks=marks, show=_show_small)
    yield Chart(
        title="Throughput",
        note="Tokens per second, all ranks.",
        series=_trend(history, "tokens_per_second"),
        marks=marks,
    )
    yield Chart(
        title="Step time",
        unit=" s",
        series=_trend(history, "step_seconds"),
        marks=marks,
        show=_show_small,
    )
    yield Chart(
        title="Peak memory",
        note="Largest over ranks.",
        unit=f" {memory_unit}",
        series=[Series("peak", memory)] if len(memory) else [],
        marks=marks,
        show=_show_small,
    )
    yield Chart(
        title="Noise scale",
        note="Tokens; batches far above it waste tokens, far below it waste steps.",
        series=_single(history, "noise_scale_tokens", "noise scale")
        + (_batch_size(history) if len(history.points("noise_scale_tokens")) else []),
        marks=marks,
    )
    yield Chart(title="Loss scale", series=_single(history, "loss_scale"), marks=marks)
    yield Chart(
        title="Expert load",
        note="Experts with the most and the fewest tokens; 1 is perfect balance.",
        series=_single(history, "expert_load_max", "most")
        + _single(history, "expert_load_min", "fewest", style="second"),
        marks=marks,
        show=_show_small,
    )


def _batch_size(history: History) -> list[Series]:
    return _single(history, "step_tokens", "batch", style="second")


def _loss_chart(history: History, figures: RunFigures, marks: list[float]) -> Chart:
    entropy = figures.unigram_entropy
    return Chart(
        title="Loss",
        note="Mean over pairs." if len(history.points("reward_margin")) else "Nats per token.",
        series=[
            *_trend(history, "loss", "train"),
            *_single(history, "eval_loss", "held out", style="second", dots=True),
        ],
        from_zero=False,
        level=None if entropy is None else (f"unigram entropy {entropy:.3f}", entropy),
        marks=marks,
        show=_show_small,
    )


def _single(
    history: History, name: str, label: str = "", *, style: str = "main", dots: bool = False
) -> list[Series]:
    points = history.points(name)
    return [Series(label or "each step", points, style, dots)] if len(points) else []


def _trend(history: History, name: str, label: str = "") -> list[Series]:
    """The values, or, when there are many, a smoothed line over a faint line of them."""
    points = history.points(name)
    if len(points) < _SMOOTH_FROM_STEPS:
        return _single(history, name, label)
    window = max(9, len(points) // 40 | 1)
    return [
        Series(label or "each step", points, "faint"),
        Series(f"trend of {window} steps", smooth(points, window), "main"),
    ]


def _memory(history: History) -> tuple[str, Points]:
    """Unit and points of peak memory."""
    points = history.points("peak_bytes")
    unit, size = ("GiB", 2**30) if points[:, 1].max(initial=0) >= 2**30 else ("MiB", 2**20)
    return unit, points / [1, size]


def tiles(figures: RunFigures) -> list[tuple[str, str, str]]:
    """(label, value, small print) of each headline figure; an unknown value is a dash."""
    small_speed = "median, all ranks"
    utilisation = "-" if figures.mfu is None else f"{figures.mfu:.1%}"
    flops = figures.tflops_per_gpu
    return [
        ("Final loss", show_loss(figures.final_loss), _loss_small_print(figures)),
        ("Held-out loss", show_loss(figures.eval_loss), _entropy_small_print(figures)),
        ("Tokens", _or_dash(figures.tokens, show_count), _steps_small_print(figures)),
        ("Wall time", _or_dash(figures.wall_seconds, show_seconds), ""),
        ("Tokens/s", _or_dash(figures.tokens_per_second, show_count), small_speed),
        ("MFU", utilisation, f"{flops:.3g} TFLOP/s per device" if flops is not None else ""),
        ("Peak memory", _or_dash(figures.peak_bytes, show_bytes), "largest over ranks and steps"),
    ]


def show_loss(loss: float | None) -> str:
    """A loss with four decimals, `nan` or `inf`; a dash when unknown."""
    if loss is None:
        return "-"
    return f"{loss:.4f}" if math.isfinite(loss) and abs(loss) < 1e6 else f"{loss:g}"


def _or_dash(value: Any, show: Any) -> str:
    return "-" if value is None else show(value)


def _loss_small_print(figures: RunFigures) -> str:
    has_history = figures.first_loss is not None and (figures.final_step or 0) > 1
    return f"from {show_loss(figures.first_loss)} at the start" if has_history else ""


def _entropy_small_print(figures: RunFigures) -> str:
    if figures.unigram_entropy is None:
        return ""
    return f"unigram entropy {figures.unigram_entropy:.4f}"


def _steps_small_print(figures: RunFigures) -> str:
    if figures.final_step is None:
        return ""
    of_total = f" of {figures.total_steps:,}" if figures.total_steps else ""
    return f"{figures.final_step:,}{of_total} step{'' if figures.final_step == 1 else 's'}"


def notices(figures: RunFigures) -> list[str]:
    """Warnings about the curves."""
    found: list[str] = []
    if figures.final_step is None:
        found.append("No step is recorded.")
    broken = figures.non_finite_steps
    if broken:
        steps = ", ".join(f"{step:,}" for step in broken[:5]) + (" and others" if len(broken) > 5 else "")
        found.append(f"Loss or gradient norm is not finite at {len(broken):,} step(s): {steps}.")
    if figures.num_skipped:
        found.append(f"{figures.num_skipped:,} update(s) were skipped because gradients overflowed.")
    return found


def _subtitle(files: RunFiles) -> str:
    model = files.run.get("model")
    family = model.get("family") if isinstance(model, dict) else model
    parameters, ranks = files.summary.get("num_parameters"), files.summary.get("num_ranks")
    precision = files.run.get("precision")
    parts = [
        str(family) if family else "",
        f"{show_count(parameters)} parameters" if isinstance(parameters, int) else "",
        f"{ranks} rank{'' if ranks == 1 else 's'}" if isinstance(ranks, int) else "",
        str(files.summary.get("device") or ""),
        str(precision.get("compute") or "") if isinstance(precision, dict) else "",
    ]
    return " · ".join(part for part in parts if part)


def _facts(files: RunFiles) -> list[tuple[str, str]]:
    """Versions of packages, device, fingerprint and goodput."""
    versions = files.summary.get("versions")
    facts = dict(versions) if isinstance(versions, dict) else {}
    facts |= {name: files.summary[name] for name in ("device", "fingerprint") if files.summary.get(name)}
    goodput = read_goodput(files.run_dir)
    if goodput is not None:
        facts["time"] = goodput.line()
    return [(str(name), str(value)) for name, value in facts.items()]


def _event_lines(events: list[Event]) -> list[tuple[str, str, str]]:
    """(time, kind, sentence) of each event; of a long history, its beginning and end."""
    shown = [event_line(event) for event in events if event["kind"] != "time"]
    if len(shown) <= _MAX_EVENTS:
        return shown
    half = _MAX_EVENTS // 2
    return [*shown[:half], ("", "gap", f"{len(shown) - 2 * half} more"), *shown[-half:]]


def event_line(event: Event) -> tuple[str, str, str]:
    """(time, kind, sentence) of one event."""
    try:
        at = datetime.fromtimestamp(event["time"], UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):
        at = "?"
    sentence = _EVENT_SENTENCE.get(event["kind"], str(event["kind"]))
    if event.get("text"):
        sentence += f": {_show_field(event['text'])}"
    rest = {name: value for name, value in event.items() if name not in _NO_DETAILS}
    details = ", ".join(_detail(name, value) for name, value in rest.items())
    return at, event["kind"], f"{sentence} ({details})" if details else sentence


def _detail(name: str, value: Any) -> str:
    """stall_seconds and 0.0173 -> `stall 17.3 ms`."""
    is_number = isinstance(value, int | float) and math.isfinite(value)
    if name.endswith("_seconds") and is_number:
        return f"{name.removesuffix('_seconds').replace('_', ' ')} {show_seconds(value)}"
    return f"{name.replace('_', ' ')} {_show_field(value)}"


def _show_field(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:200]


def _show_small(value: float) -> str:
    return f"{value:.4g}"


def _coloured_yaml(text: str) -> Markup:
    """YAML as HTML with keys in bold; the text is escaped first."""
    return Markup(_YAML_KEY.sub(r"\1<b>\2</b>\3", str(escape(text.rstrip()))))


def _hover(drawing: Drawing) -> dict[str, Any]:
    """The data that the script needs to show values of one chart."""
    return {
        "x": [drawing.low_step, drawing.high_step],
        "y": [drawing.low, drawing.high],
        "unit": drawing.unit,
        "lines": [
            {"label": line.label, "style": line.style, "steps": line.steps, "values": line.values}
            for line in drawing.lines
        ],
    }
