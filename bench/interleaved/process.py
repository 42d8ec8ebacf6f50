"""A contender's process as the driver of `bench/step.py` sees it: started, spoken to, ended."""

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
# What a process takes on the card beside its tensors: the context, loaded kernels, the libraries' own.
CONTEXT_BYTES = int(0.8 * GIB)
# Of inductor in every process; a dozen of them compile at once.
COMPILE_THREADS = 4

# new: not started. importing: imports. imported: waits to build. building: weights and compiler. compiled:
# waits for the card. warming: first steps. resting: waits for its turn. timing: has it. gone: ended.
State = Literal[
    "new", "importing", "imported", "building", "compiled", "warming", "resting", "timing", "gone"
]
# When a contender says this, it is there now.
_NEXT: dict[str, State] = {
    "imported": "imported",
    "compiled": "compiled",
    "ready": "resting",
    "timed": "resting",
    "failed": "gone",
}


@dataclass(frozen=True)
class Entry:
    """One contender with one setting; the bytes are estimates until it has made steps."""

    case: str
    peer: str
    """Settings of the same peer compete in the sweep, and the best goes on."""
    label: str
    contender: str
    settings: dict[str, Any]
    run: dict[str, Any]
    built_bytes: int
    rest_bytes: int
    peak_bytes: int
    times: int | None = None
    """Besides the usual turns one with so many times the micro-batches."""

    @property
    def is_class_of_its_own(self) -> bool:
        """fp8: nobody here is compared with it."""
        return self.run.get("precision", {}).get("fp8") is not None

    @property
    def facts(self) -> dict[str, Any]:
        """What every row of it carries."""
        return {
            "case": self.case,
            "peer": self.peer,
            "label": self.label,
            "contender": self.contender,
            "settings": self.settings,
        }


@dataclass
class Resident:
    """A contender's process, where it stands, and what it takes on the card."""

    entry: Entry
    state: State = "new"
    rest_bytes: int = 0
    peak_bytes: int = 0
    told: dict[str, Any] = field(default_factory=dict)
    """Of its warm-up: first loss, seconds of compiling, machine."""
    error: str | None = None
    words: list[str] = field(default_factory=list)
    timings: list[dict[str, Any]] = field(default_factory=list)
    since: float = field(default_factory=time.monotonic)
    is_beside_others: bool = False
    """Whether anyone else held memory of the card when it first ran."""

    def __post_init__(self) -> None:
        self.rest_bytes = self.entry.rest_bytes + CONTEXT_BYTES
        self.peak_bytes = self.entry.peak_bytes + CONTEXT_BYTES

    def start(self, folder: Path, *, warmup_steps: int) -> None:
        """Start the process; from now on its messages can be read at `fileno`."""
        name = re.sub(r"\W+", "-", f"{self.entry.case}-{self.entry.label}")
        request, self._log = folder / f"{name}.json", folder / f"{name}.log"
        asked = {"contender": self.entry.contender, "settings": self.entry.settings, "run": self.entry.run}
        request.write_text(json.dumps({**asked, "warmup_steps": warmup_steps}))
        with self._log.open("w") as words:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "bench.interleaved.worker", str(request)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=words,
                env=environment(),
                cwd=ROOT,
                text=True,
                bufsize=1,
                process_group=0,  # so that its workers end with it
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._channel = Channel(self._process.stdout, self._process.stdin)
        self.enter("importing")

    def fileno(self) -> int:
        """Where a selector looks for its messages."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def enter(self, state: State) -> None:
        """Be in a state from now on."""
        self.state, self.since = state, time.monotonic()

    def order(self, state: State, **message: Any) -> None:
        """Give an order and be in the state that it leads to; that a process is dead is found later."""
        self.enter(state)
        with contextlib.suppress(BrokenPipeError):
            self._channel.send(**message)

    def hear(self) -> None:
        """Take one message in; the end of the pipe is an end with an error."""
        try:
            message = self._channel.receive()
        except (EOFError, json.JSONDecodeError):
            self.end(self.error or self._last_words())
            return
        self.enter(_NEXT[message["state"]])
        self.rest_bytes = message.get("rest_bytes", self.rest_bytes - CONTEXT_BYTES) + CONTEXT_BYTES
        self.peak_bytes = message.get("peak_bytes", self.peak_bytes - CONTEXT_BYTES) + CONTEXT_BYTES
        if message["state"] == "ready":
            kept = ("first_loss", "compile_seconds")
            self.told = {**message["facts"], **{key: message[key] for key in kept}}
        elif message["state"] == "timed":
            self.timings.append(message["row"])
        elif message["state"] == "failed":
            self.end(message["error"])

    def end(self, error: str | None = None) -> None:
        """End the process and its workers, if they have not ended by themselves."""
        self.error = error
        self.words = self._log.read_text(errors="replace").splitlines()[-40:] if error else []
        self.enter("gone")
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _last_words(self) -> str:
        return last_words(self._log.read_text(errors="replace").splitlines())


def last_words(lines: list[str]) -> str:
    """The last line that names an error, or the last line."""
    told = [line for line in lines if re.match(r"\w*(\.\w+)*(Error|Exception)\b", line)]
    spoken = [line for line in lines if line.strip()]
    return (told or spoken or ["the process ended without a word"])[-1][:300]


def environment() -> dict[str, str]:
    """What every contender's process gets; what the user says counts."""
    paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "TORCHINDUCTOR_CACHE_DIR": str(Path(tempfile.gettempdir()) / "bench-inductor-cache"),
        "TORCHINDUCTOR_COMPILE_THREADS": str(COMPILE_THREADS),
        "TOKENIZERS_PARALLELISM": "false",
        **os.environ,
        "PYTHONPATH": ":".join(path for path in paths if path),
    }
