"""Which nodes take part in a run whose number of nodes may change: agreed on in files of the run directory.

Each node's supervisor writes a member file twice a second. The living node with the lowest number leads: it
publishes a world, a numbered file that lists the nodes in the order of their ranks. A world file is made by a
hard link, so that of two leaders one wins. Nodes follow the newest world. Imports no torch.
"""

import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from meshwright.launch.node_ends import FOLDER

_BEAT_SECONDS = 0.5


@dataclass(frozen=True)
class Member:
    """The last sign of life of a node's supervisor."""

    node: int
    session: str
    """Another one for each start of the supervisor."""
    beat: int
    """Increases while the supervisor lives."""
    hostname: str
    address: str
    """Where rank 0 listens if this node has it."""
    ready_for: int = 0
    """The world that this node may start, or has started: it has no ranks of an earlier one."""
    ended_in: int | None = None
    """The world in which this node has ended the run; None while it goes on."""
    code: int = 0
    """Its exit code then."""


@dataclass(frozen=True)
class NodeWorld:
    """The nodes that take part, in the order of their ranks."""

    number: int
    nodes: tuple[int, ...]
    saves: bool
    """Whether ranks of the world before save first: no node of it is lost."""


class NodeMembers:
    """The supervisors of all nodes, as the one of this node sees them. `look` is called often.

    Signs of life are compared on the clock of this node only, and times of files do not matter.
    """

    def __init__(
        self,
        run_dir: Path,
        node: int,
        *,
        num_nodes: int,
        address: str,
        grace_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._num_nodes, self._clock = run_dir / FOLDER, num_nodes, clock
        self._grace = grace_seconds
        self._own = Member(node, uuid.uuid4().hex, 0, socket.gethostname(), address)
        self._seen: dict[int, tuple[Member, float | None]] = {}
        self._looked_at = self._began_at = clock()
        self.world: NodeWorld | None = None
        """The newest world; None before the first."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._look()

    def look(self) -> None:
        """Give a sign of life, and read those of the others and the newest world; at most twice a second."""
        if self._clock() - self._looked_at >= _BEAT_SECONDS:
            self._look()

    def _look(self) -> None:
        self._looked_at = self._clock()
        with suppress(OSError):  # a file system that is gone ends the run elsewhere
            self._own = replace(self._own, beat=self._own.beat + 1)
            self._write(f"member-{self._own.node}.json", self._own)
        for node in range(self._num_nodes):
            self._look_at(node)
        while (found := self._read_world((self.world.number if self.world else 0) + 1)) is not None:
            self.world = found

    def _look_at(self, node: int) -> None:
        found = _read(self._folder / f"member-{node}.json")
        if found is None:
            return
        with suppress(TypeError):
            member = Member(**found)
            known = self._seen.get(node)
            if known is None:  # perhaps of an earlier run: it lives when it changes
                self._seen[node] = (member, None)
            elif member != known[0]:
                self._seen[node] = (member, self._clock())

    def _read_world(self, number: int) -> NodeWorld | None:
        found = _read(self._folder / f"world-{number}.json")
        if found is None:
            return None
        with suppress(TypeError, KeyError):
            return NodeWorld(int(found["number"]), tuple(found["nodes"]), bool(found["saves"]))
        return None

    @property
    def living(self) -> list[int]:
        """Nodes with a sign of life within the grace time, this one included."""
        now, own = self._clock(), self._own.node
        changed = {node: at for node, (_, at) in self._seen.items() if at is not None}
        return sorted({own, *(node for node, at in changed.items() if now - at <= self._grace)})

    @property
    def is_leader(self) -> bool:
        """Whether this node publishes worlds: the living node with the lowest number."""
        return self.living[0] == self._own.node

    @property
    def has_waited(self) -> bool:
        """Whether all nodes live, or had the grace time to start."""
        return len(self.living) == self._num_nodes or self._clock() - self._began_at > self._grace

    def address_of(self, node: int) -> str:
        """Where rank 0 listens if it is on this node."""
        return self._own.address if node == self._own.node else self._seen[node][0].address

    def get_ready(self) -> bool:
        """Say that this node has no ranks of an earlier world; whether all nodes of the newest one say so.

        Rank 0 may move to another node, where it needs the lock of the run directory.
        """
        assert self.world is not None
        if self._own.ready_for != self.world.number:
            self._own = replace(self._own, ready_for=self.world.number)
            self._look()
        members = [self._seen[node][0] for node in self.world.nodes if node in self._seen]
        ready = [one for one in members if one.ready_for == self.world.number]
        return len(ready) == len(self.world.nodes)

    def ended(self) -> int | None:
        """The exit code of a node that has ended the run in the newest world; None while it goes on."""
        if self.world is None:
            return None
        seen = [self._seen[node] for node in self.world.nodes if node in self._seen]
        codes = [one.code for one, at in seen if at is not None and one.ended_in == self.world.number]
        return codes[0] if codes else None

    def lost_hosts(self) -> set[str]:
        """Host names of nodes that were seen and no longer live, on which no living node is."""
        living = set(self.living)
        hosts = {True: {self._own.hostname}, False: set[str]()}
        for node, (member, _) in self._seen.items():
            hosts[node in living].add(member.hostname)
        return hosts[False] - hosts[True]

    def publish(self, nodes: Sequence[int], *, saves: bool) -> None:
        """Publish the next world, unless another node was faster; either way `world` is the newest."""
        number = (self.world.number if self.world else 0) + 1
        draft = self._folder / f"world-{uuid.uuid4().hex}.draft"
        with suppress(OSError):
            draft.write_text(json.dumps(asdict(NodeWorld(number, tuple(nodes), saves))))
            with suppress(FileExistsError):
                os.link(draft, self._folder / f"world-{number}.json")
        with suppress(OSError):
            draft.unlink()
        self._look()

    def end(self, code: int) -> None:
        """This node has ended the run: spare nodes end too, and no other world is published."""
        number = self.world.number if self.world else None
        with suppress(OSError):
            self._own = replace(self._own, ended_in=number, code=code)
            self._write(f"member-{self._own.node}.json", self._own)

    def _write(self, name: str, member: Member) -> None:
        draft = self._folder / f"{name}.draft"
        draft.write_text(json.dumps(asdict(member)))
        os.replace(draft, self._folder / name)


def own_address(host: str, port: int) -> str:
    """The address of this node from which it reaches a host; the host itself where it is unknown."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing
        return str(probe.getsockname()[0])
    return host


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return None
    return cast(dict[str, Any], found) if isinstance(found, dict) else None
