"""The nodes that the next start of a run has, where their number may change. Imports no torch."""

import sys
import time
from dataclasses import replace
from pathlib import Path

from meshwright.launch.attempt import AttemptEnd, Interruption
from meshwright.launch.launched_node import LaunchedNode
from meshwright.launch.node_world import NodeMembers, NodeWorld, own_address
from meshwright.resilience.elastic import mesh_text, overrides, run_on
from meshwright.resilience.run_lock import release_lost_lock
from meshwright.spec import RunSpec
from meshwright.spec.resilience import ElasticSpec

_POLL_SECONDS = 0.1


class ElasticNodes:
    """The run with the mesh for the nodes that live, and this node's place among them."""

    def __init__(self, run: RunSpec, elastic: ElasticSpec, node: LaunchedNode, run_dir: Path) -> None:
        self._full, self._launched, self._run_dir = run, node, run_dir
        self._per_node = node.num_local_ranks(run.parallel.num_ranks + elastic.spare_ranks)
        self._members = NodeMembers(
            run_dir,
            node.node,
            num_nodes=node.num_nodes,
            address=node.host if node.node == 0 else own_address(node.host, node.port),
            grace_seconds=elastic.node_grace_seconds,
        )
        self.run, self.node = run, node
        """The run that the next start has, and this node among those that take part."""
        self._number = self._said = 0
        """Numbers of the world that the ranks are in, and of the one that was printed last."""
        self._considered: tuple[list[int], NodeWorld | None] | None = None

    @property
    def devices(self) -> None:
        """All devices of a node are used."""

    @property
    def overrides(self) -> list[str]:
        """What differs from the run that was asked for, as overrides on the command line."""
        return overrides(self._full, self.run)

    def begin(self) -> int | None:
        """Wait until this node takes part; the exit code of the run where it has ended without this node."""
        has_said = False
        while not self._takes_part():
            if (code := self._members.ended()) is not None:
                return code
            world = self._members.world
            if world is not None and self._launched.node not in world.nodes and not has_said:
                has_said = True
                print(f"node {self._launched.node} waits: the run goes on without it", file=sys.stderr)
            time.sleep(_POLL_SECONDS)
        self._join()
        return None

    def _takes_part(self) -> bool:
        self._members.look()
        self._lead()
        world = self._members.world
        return world is not None and self._launched.node in world.nodes and self._members.get_ready()

    def _join(self) -> None:
        """Take the mesh and the place of the newest world."""
        world = self._members.world
        assert world is not None
        if self._number and world.number != self._said:
            print(self._text(world), file=sys.stderr, flush=True)
        release_lost_lock(self._run_dir, self._members.lost_hosts())
        num_ranks = len(world.nodes) * self._per_node
        self.run = run_on(self._full, num_ranks, multiple_of=self._per_node) or self._full
        self._number = world.number
        self.node = replace(
            self._launched,
            node=world.nodes.index(self._launched.node),
            num_nodes=len(world.nodes),
            ranks_per_node=self._per_node,
            host=self._members.address_of(world.nodes[0]),
            world=world.number,
        )

    def _lead(self) -> None:
        """Publish another world where this node leads and other nodes than those of the newest one live."""
        members, current = self._members, self._members.world
        if not (members.has_waited and members.is_leader) or members.ended() is not None:
            return
        living = members.living
        if (living, current) == self._considered:
            return
        self._considered = (living, current)
        before = [node for node in (current.nodes if current else ()) if node in living]
        mesh = run_on(self._full, len(living) * self._per_node, multiple_of=self._per_node)
        if mesh is None:  # too few: wait for the others
            return
        num_nodes = mesh.parallel.num_ranks // self._per_node
        others = [node for node in living if node not in before]
        nodes = tuple(sorted([*before, *others][:num_nodes]))
        is_lost = current is not None and len(before) < len(current.nodes)
        if current is None or is_lost or len(nodes) > len(current.nodes):
            members.publish(nodes, saves=not is_lost)

    def change(self) -> Interruption | None:
        """A reason to end the ranks of this node: other nodes take part now."""
        self._members.look()
        self._lead()
        world = self._members.world
        if world is None or world.number == self._number:
            return None
        self._said = world.number
        return Interruption("resized", self._text(world), saves=world.saves)

    def _text(self, world: NodeWorld) -> str:
        mesh = run_on(self._full, len(world.nodes) * self._per_node, multiple_of=self._per_node)
        nodes = ", ".join(map(str, world.nodes))
        return f"going on with nodes {nodes}" + (f": {mesh_text(mesh.parallel)}" if mesh else "")

    def after(self, ended: AttemptEnd) -> str:
        """What has changed for the next start; the interruption has said it already."""
        return ""

    def end(self, code: int) -> None:
        """This node ends the run."""
        self._members.end(code)
