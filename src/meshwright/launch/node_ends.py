"""The ends of other nodes' supervisors, as small files in the run directory. Imports no torch.

No node waits for ranks of a node that has given up.
"""

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.launch.attempt import Interruption

FOLDER = "supervisors"


@dataclass(frozen=True)
class NodeEnd:
    """How the supervisor of another node has ended."""

    node: int
    code: int
    reason: str


class NodeEnds:
    """Says when the supervisor of this node ends, and sees when that of another does.

    Times are compared as the file server writes them, so the clocks of the nodes do not matter.
    """

    def __init__(self, run_dir: Path, node: int) -> None:
        self._folder, self._node = run_dir / FOLDER, node
        self._own = self._folder / f"node-{node}.json"
        self._began_at = 0.0

    def begin(self) -> None:
        """This node starts: earlier ends of it no longer hold."""
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._write({"state": "running"})
            self._began_at = self._own.stat().st_mtime

    def end(self, code: int, reason: str) -> None:
        """This node gives up, with an exit code that is not 0; others that wait for it end too."""
        with suppress(OSError):
            self._write({"state": "ended", "code": code, "reason": reason})

    def other(self) -> NodeEnd | None:
        """Another node that has given up since this one began; None where there is none."""
        for path in sorted(self._folder.glob("node-*.json")):
            with suppress(OSError, ValueError, KeyError, TypeError):
                if path == self._own or path.stat().st_mtime < self._began_at:
                    continue
                found: Any = json.loads(path.read_text())
                if found["state"] == "ended":
                    node = int(path.stem.removeprefix("node-"))
                    return NodeEnd(node, int(found["code"]), str(found["reason"]))
        return None

    def interruption(self) -> Interruption | None:
        """A reason to end the ranks of this node: another node has given up."""
        other = self.other()
        if other is None:
            return None
        text = f"node {other.node} has ended with exit code {other.code}: {other.reason}"
        return Interruption("failed", text, other.code)

    def _write(self, facts: dict[str, Any]) -> None:
        draft = self._own.with_suffix(".draft")
        draft.write_text(json.dumps(facts))
        os.replace(draft, self._own)
