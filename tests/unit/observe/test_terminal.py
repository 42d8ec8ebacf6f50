"""The live bar on a real pseudo-terminal, seen through a terminal emulator: sizes, resizing, Ctrl-C."""

import fcntl
import os
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

pyte = pytest.importorskip("pyte", reason="pyte is not installed: the terminal is not tested")

# Does what its standard input says, and acknowledges each command on its standard output.
PROGRAM = """
import os
import sys
from meshwright.observe.metrics import StepMetrics, WorkRate
from meshwright.observe.progress import open_progress

rate = WorkRate(flops_per_token=6e9, num_ranks=1, peak_flops_per_second=989e12)
with open_progress("llama-3.1-8b-sft-on-chats", total_steps=200_000) as progress:
    for line in sys.stdin:
        command, _, text = line.rstrip("\\n").partition(" ")
        if command == "step":
            step = StepMetrics(step=int(text), loss=2.5, grad_norm=1.0, lr=1e-3, tokens=1000 * int(text),
                               step_tokens=524288, step_seconds=0.51, peak_bytes=None)
            progress.update(rate.fill(step))
        elif command == "print":
            progress.print(text)
        if hasattr(progress, "refresh"):
            progress.refresh()
        os.write(1, b"done\\n")  # not print: the bar takes over standard output
"""


class Terminal:
    """A program on a terminal of some size."""

    def __init__(self, columns: int, rows: int = 12) -> None:
        self.screen = pyte.HistoryScreen(columns, rows, history=1000)
        self._stream = pyte.ByteStream(self.screen)
        self._master, slave = os.openpty()
        self._set_size(columns, rows)
        environment = {**os.environ, "TERM": "xterm-256color", "NO_COLOR": "", "COLUMNS": "", "LINES": ""}
        for name in ("NO_COLOR", "COLUMNS", "LINES"):
            del environment[name]
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=slave,
            text=True,
            env=environment,
        )
        os.close(slave)

    def _set_size(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def resize(self, columns: int) -> None:
        """Change the size while the program stands still, so that nothing for the old size is in flight."""
        rows = self.screen.lines
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)
        self._read()
        self._set_size(columns, rows)
        self.screen.resize(rows, columns)
        self.process.send_signal(signal.SIGWINCH)
        self.process.send_signal(signal.SIGCONT)

    def tell(self, command: str) -> None:
        """Let the program do something, and take in what it draws."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"
        self._read()

    def end(self) -> None:
        """Wait for the end of the program, and take in what it draws."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)
        self._read()

    def _read(self) -> None:
        deadline = time.monotonic() + 1.0  # the bar draws itself again and again
        while time.monotonic() < deadline and select.select([self._master], [], [], 0.05)[0]:
            try:
                content = os.read(self._master, 65536)
            except OSError:  # the program has closed its side
                return
            self._stream.feed(content)

    @property
    def lines(self) -> list[str]:
        """What a person sees, without empty lines."""
        return [line.rstrip() for line in self.screen.display if line.strip()]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None and not pipe.closed:
                pipe.close()
        os.close(self._master)


@contextmanager
def terminal(columns: int) -> Iterator[Terminal]:
    opened = Terminal(columns)
    try:
        yield opened
    finally:
        opened.close()


BAR = "╺━╸"


def bars(lines: list[str]) -> list[str]:
    return [line for line in lines if any(character in line for character in BAR)]


@pytest.mark.parametrize("columns", [40, 60, 80, 200])
def test_the_bar_is_one_line_on_any_terminal(columns: int):
    with terminal(columns) as seen:
        seen.tell("step 1")
        seen.tell("step 1200")
        seen.tell("print saved step-00001200")
        seen.tell("step 123456")
        (bar,) = bars(seen.lines)
        assert seen.lines == ["saved step-00001200", bar] and len(bar) <= columns
        assert "123456/200000" in bar and "loss 2.5000" in bar
        assert ("ETA" in bar) == (columns == 200)


def test_resizing_leaves_one_bar_and_all_printed_lines():
    with terminal(100) as seen:
        seen.tell("print first")
        seen.tell("step 10")
        for number, columns in enumerate((60, 160, 45, 100)):
            seen.resize(columns)
            seen.tell(f"step {20 + number}")
            (bar,) = bars(seen.lines)
            assert len(bar) <= columns and f"{20 + number}/200000" in bar
            seen.tell(f"print resized to {columns}")
        printed = [line for line in seen.lines if line not in bars(seen.lines)]
        assert printed == ["first", *(f"resized to {columns}" for columns in (60, 160, 45, 100))]


def test_ctrl_c_leaves_a_clean_terminal():
    with terminal(80) as seen:
        seen.tell("step 10")
        assert seen.screen.cursor.hidden
        seen.process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + 60
        while seen.process.poll() is None:
            assert time.monotonic() < deadline
            seen._read()
        seen._read()
        assert not seen.screen.cursor.hidden and seen.screen.cursor.x == 0
        assert len(bars(seen.lines)) == 1
        below = "".join(seen.screen.display[seen.screen.cursor.y :]).strip()
        assert below == ""  # the shell's prompt begins on an empty line


def test_a_long_line_is_not_lost_under_the_bar():
    with terminal(60) as seen:
        seen.tell("step 1")
        seen.tell("print warning: " + "a long explanation " * 6)
        seen.tell("step 2")
        seen.end()
        assert " ".join(seen.lines).count("explanation") == 6 and len(bars(seen.lines)) == 1
        assert not seen.screen.cursor.hidden
