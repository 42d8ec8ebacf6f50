"""A contender's process as the driver of `bench.step` sees it: started, commanded, ended."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bench.interleaved.channel import Channel

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30
# Device memory of a process besides its tensors: the CUDA context, loaded kernels, library workspaces.
CONTEXT_BYTES = int(0.8 * GIB)
# Inductor's compile workers per process; a dozen processes compile at once.
COMPILE_THREADS = 4
LOG_TAIL_LINES = 40

# new: not started. importing. imported: waits to build. building: allocates and compiles. compiled: waits for
# the device. warming: makes its first steps. idle: waits for its next window. timing: in a window. ended.
State = Literal["new", "importing", "imported", "building", "compiled", "warming", "idle", "timing", "ended"]
# The state that each message of a worker leads to.
_STATE_AFTER: dict[str, State] = {
    "imported": "imported",
    "compiled": "compiled",
    "ready": "idle",
    "timed": "idle",
    "failed": "ended",
}


@dataclass(frozen=True)
class Entry:
    """One contender with one setting; its bytes are estimates until it has made steps."""

    case: str
    peer: str
    """Entries of the same peer compete in the sweep, and the fastest takes part in the rounds."""
    label: str
    contender: str
    settings: dict[str, Any]
    run: dict[str, Any]
    built_bytes: int
    """Bytes while it builds and compiles."""
    idle_bytes: int
    """Bytes between its windows."""
    peak_bytes: int
    accumulation_factor: int | None = None
    """After the rounds, one more window with this many times the micro-batches per step."""

    @property
    def is_fp8(self) -> bool:
        """Whether it computes in fp8; no peer is compared with it."""
        return self.run.get("precision", {}).get("fp8") is not None

    @property
    def facts(self) -> dict[str, Any]:
        """The columns that every row of this entry has."""
        return {
            "case": self.case,
            "peer": self.peer,
            "label": self.label,
            "contender": self.contender,
            "settings": self.settings,
        }


@dataclass
class ContenderProcess:
    """The process of one entry, its state, and its memory on the device."""

    entry: Entry
    state: State = "new"
    idle_bytes: int = 0
    peak_bytes: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    """First loss, compile seconds and machine, reported after the warm-up."""
    error: str | None = None
    log_tail: list[str] = field(default_factory=list)
    """The last lines of its log, if it failed."""
    timings: list[dict[str, Any]] = field(default_factory=list)
    state_since: float = field(default_factory=time.monotonic)
    shares_device: bool = False
    """Whether another contender held device memory when it warmed up."""

    def __post_init__(self) -> None:
        self.idle_bytes = self.entry.idle_bytes + CONTEXT_BYTES
        self.peak_bytes = self.entry.peak_bytes + CONTEXT_BYTES

    def start(self, folder: Path, *, warmup_steps: int) -> None:
        """Start the process; from now on its messages arrive at `fileno`."""
        name = re.sub(r"\W+", "-", f"{self.entry.case}-{self.entry.label}")
        request, self._log = folder / f"{name}.json", folder / f"{name}.log"
        asked = {"contender": self.entry.contender, "settings": self.entry.settings, "run": self.entry.run}
        request.write_text(json.dumps({**asked, "warmup_steps": warmup_steps}))
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "bench.interleaved.worker", str(request)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment(),
                cwd=ROOT,
                text=True,
                bufsize=1,
                process_group=0,  # so that its own workers end with it
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._channel = Channel(self._process.stdout, self._process.stdin)
        self.enter("importing")

    def fileno(self) -> int:
        """The file descriptor of its messages, for a selector."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def enter(self, state: State) -> None:
        """Change to a state."""
        self.state, self.state_since = state, time.monotonic()

    def command(self, state: State, **message: Any) -> None:
        """Send a command and change to the state it leads to; a dead process is noticed on receiving."""
        self.enter(state)
        with contextlib.suppress(BrokenPipeError):
            self._channel.send(**message)

    def receive(self) -> None:
        """Process one message; a closed pipe means that the process failed."""
        try:
            message = self._channel.receive()
        except (EOFError, json.JSONDecodeError):
            self.end(self.error or error_line(self._log.read_text(errors="replace").splitlines()))
            return
        self.enter(_STATE_AFTER[message["state"]])
        self.idle_bytes = message.get("idle_bytes", self.idle_bytes - CONTEXT_BYTES) + CONTEXT_BYTES
        self.peak_bytes = message.get("peak_bytes", self.peak_bytes - CONTEXT_BYTES) + CONTEXT_BYTES
        if message["state"] == "ready":
            measured = {key: message[key] for key in ("first_loss", "compile_seconds")}
            self.facts = {**message["facts"], **measured}
        elif message["state"] == "timed":
            self.timings.append(message["row"])
        elif message["state"] == "failed":
            self.end(message["error"])

    def end(self, error: str | None = None) -> None:
        """Kill the process and its workers, if they are still alive."""
        self.error = error
        if error:
            self.log_tail = self._log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        self.enter("ended")
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def error_line(lines: list[str]) -> str:
    """The last line of a log that names an exception, or its last line."""
    errors = [line for line in lines if re.match(r"\w*(\.\w+)*(Error|Exception)\b", line)]
    not_empty = [line for line in lines if line.strip()]
    return (errors or not_empty or ["the process ended without output"])[-1][:300]


def environment() -> dict[str, str]:
    """The environment of a contender's process; variables that are already set win."""
    paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "TORCHINDUCTOR_CACHE_DIR": str(Path(tempfile.gettempdir()) / "bench-inductor-cache"),
        "TORCHINDUCTOR_COMPILE_THREADS": str(COMPILE_THREADS),
        "TOKENIZERS_PARALLELISM": "false",
        **os.environ,
        "PYTHONPATH": ":".join(path for path in paths if path),
    }
