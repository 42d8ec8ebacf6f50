"""Progress is readable without a terminal and without colour."""

import io
import math
import re

import pytest
from rich.console import Console, ConsoleDimensions

from meshwright.observe.metrics import StepMetrics, WorkRate
from meshwright.observe.progress import LiveProgress, PlainProgress, open_progress

RATE = WorkRate(flops_per_token=6e9, num_ranks=1)


def a_step(step: int, loss: float = 2.5, seconds: float = 0.5) -> StepMetrics:
    return RATE.fill(
        StepMetrics(
            step=step,
            loss=loss,
            grad_norm=1.0,
            lr=1e-3,
            tokens=step * 1000,
            step_tokens=1000,
            step_seconds=seconds,
            peak_bytes=None,
        )
    )


def test_plain_lines_for_first_and_last_step() -> None:
    stream = io.StringIO()
    with open_progress("demo", total_steps=4, every_seconds=3600, stream=stream) as progress:
        for step in range(1, 5):
            progress.update(a_step(step))
        progress.print("saved")
    assert stream.getvalue().splitlines() == [
        "demo: step 1/4, loss 2.5000, 2K tokens/s",
        "demo: step 4/4, loss 2.5000, 2K tokens/s, done",
        "saved",
    ]


def test_plain_progress_prints_the_step_at_which_it_stopped() -> None:
    stream = io.StringIO()
    with PlainProgress("demo", total_steps=9, every_seconds=3600, stream=stream) as progress:
        progress.update(a_step(1))
        progress.update(a_step(2, loss=math.nan))
    assert stream.getvalue().splitlines()[-1] == "demo: step 2/9, loss nan, 2K tokens/s, ETA 3.50 s"


def test_a_printed_line_follows_its_step_and_the_first_step_gives_no_eta() -> None:
    stream = io.StringIO()
    with PlainProgress("demo", total_steps=9, every_seconds=3600, stream=stream) as progress:
        progress.update(a_step(1, seconds=60.0))
        progress.update(a_step(2))
        progress.print("saved")
    assert stream.getvalue().splitlines()[1:] == [
        "demo: step 2/9, loss 2.5000, 2K tokens/s, ETA 3.50 s",
        "saved",
    ]


def test_plain_progress_every_zero_seconds_writes_every_step() -> None:
    stream = io.StringIO()
    with PlainProgress("demo", total_steps=3, every_seconds=0, stream=stream) as progress:
        for step in (1, 2, 3):
            progress.update(a_step(step))
    assert len(stream.getvalue().splitlines()) == 3


class Terminal(io.StringIO):
    """A text stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def test_live_bar_on_a_terminal(monkeypatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    stream = Terminal()
    progress = open_progress("demo", total_steps=2, stream=stream)
    assert isinstance(progress, LiveProgress)
    with progress:
        progress.update(a_step(1))
        progress.print("saved [step-1]")
        progress.update(a_step(2))
    shown = stream.getvalue()
    assert "saved [step-1]" in shown
    assert "loss 2.5000" in shown
    assert "2/2" in shown


def test_no_colour_when_asked(monkeypatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    with open_progress("demo", total_steps=1, stream=stream) as progress:
        progress.update(a_step(1))
    assert "\x1b[3" not in stream.getvalue()


@pytest.mark.parametrize("width", [30, 50, 80, 140])
def test_the_step_count_stays_on_a_narrow_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    stream = io.StringIO()
    with LiveProgress("a-rather-long-name-of-a-run", total_steps=12000, stream=stream) as progress:
        progress.update(a_step(7000))
        progress.update(a_step(7001))
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    last = [line for line in text.replace("\r", "\n").splitlines() if "7001" in line][-1]
    assert "7001/12000" in last and len(last.rstrip()) <= width
    assert "loss 2.5000" in last or width < 50


def test_quiet_shows_nothing() -> None:
    stream = io.StringIO()
    with open_progress("demo", total_steps=4, stream=stream, quiet=True) as progress:
        progress.update(a_step(1))
        progress.print("saved")
    assert stream.getvalue() == ""


def test_the_bar_follows_a_terminal_that_is_resized(monkeypatch: pytest.MonkeyPatch) -> None:
    columns, stream = [120], io.StringIO()
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(Console, "size", property(lambda _: ConsoleDimensions(columns[0], 24)))
    with LiveProgress("demo", total_steps=100, stream=stream) as progress:
        progress.update(a_step(1))
        progress.update(a_step(2))
        progress.refresh()
        wide = newest_line(stream)
        columns[0] = 44
        progress.update(a_step(3))
        progress.refresh()
        narrow = newest_line(stream)
    assert "2/100" in wide and "ETA" in wide and len(wide) > 100
    assert "3/100" in narrow and "ETA" not in narrow and len(narrow) <= 44


def newest_line(stream: io.StringIO) -> str:
    """The newest line of a live bar, without control characters."""
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue()))
    return [line for line in lines if line.strip()][-1]
