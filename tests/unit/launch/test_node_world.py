"""Which nodes take part: members that live, one leader, one newest world."""

import json

from meshwright.launch.node_world import NodeMembers, NodeWorld, own_address


class Lab:
    """Supervisors of nodes in one run directory, on one clock that the test moves."""

    def __init__(self, run_dir) -> None:
        self.run_dir, self.now = run_dir, 0.0

    def start(self, node: int, num_nodes: int = 3) -> NodeMembers:
        return NodeMembers(
            self.run_dir,
            node,
            num_nodes=num_nodes,
            address=f"10.0.0.{node}",
            grace_seconds=5.0,
            clock=lambda: self.now,
        )

    def pass_seconds(self, seconds: float, *living: NodeMembers) -> None:
        for _ in range(int(seconds)):
            self.now += 1.0
            for one in (*living, *living):  # each has seen what the others wrote
                one._looked_at -= 1.0
                one.look()


def test_nodes_live_as_long_as_they_give_signs_of_life(tmp_path):
    lab = Lab(tmp_path)
    zero, one, two = (lab.start(node) for node in range(3))
    assert one.living == [1], "files of others may be of an earlier run"
    lab.pass_seconds(2, zero, one, two)
    assert zero.living == one.living == two.living == [0, 1, 2]
    assert zero.is_leader and not one.is_leader and one.has_waited
    lab.pass_seconds(7, one, two)
    assert one.living == two.living == [1, 2] and one.is_leader and not two.is_leader
    back = lab.start(0)
    lab.pass_seconds(2, back, one, two)
    assert one.living == [0, 1, 2] and back.is_leader


def test_of_two_leaders_one_publishes_and_all_follow(tmp_path):
    lab = Lab(tmp_path)
    zero, one = lab.start(0, 2), lab.start(1, 2)
    lab.pass_seconds(2, zero, one)
    zero.publish([0, 1], saves=True)
    one.publish([1], saves=False)
    assert zero.world == one.world == NodeWorld(1, (0, 1), saves=True), "the first one counts"
    assert one.address_of(0) == "10.0.0.0" and one.address_of(1) == "10.0.0.1"
    assert list(tmp_path.glob("supervisors/*.draft")) == []


def test_a_world_starts_when_all_its_nodes_have_left_the_one_before(tmp_path):
    lab = Lab(tmp_path)
    zero, one = lab.start(0, 2), lab.start(1, 2)
    lab.pass_seconds(2, zero, one)
    zero.publish([0, 1], saves=True)
    lab.pass_seconds(1, zero, one)
    assert not zero.get_ready(), "node 1 may have ranks of an earlier world"
    lab.pass_seconds(1, zero, one)
    assert one.get_ready()
    lab.pass_seconds(1, zero, one)
    assert zero.get_ready()


def test_a_spare_learns_that_the_run_has_ended_and_an_earlier_end_does_not_count(tmp_path):
    lab = Lab(tmp_path)
    zero, spare = lab.start(0, 2), lab.start(1, 2)
    lab.pass_seconds(2, zero, spare)
    zero.publish([0], saves=True)
    assert spare.ended() is None
    zero.end(130)
    lab.pass_seconds(1, spare)
    assert spare.ended() == 130
    again = lab.start(1, 2)
    assert again.ended() is None and again.world == NodeWorld(1, (0,), saves=True)


def test_a_leader_waits_for_the_others_at_the_start(tmp_path):
    lab = Lab(tmp_path)
    one = lab.start(1)
    lab.pass_seconds(4, one)
    assert one.is_leader and not one.has_waited
    lab.pass_seconds(2, one)
    assert one.has_waited


def test_hosts_are_lost_where_no_living_node_is(tmp_path):
    lab = Lab(tmp_path)
    zero, one = lab.start(0), lab.start(1)
    lab.pass_seconds(2, zero, one)
    path = tmp_path / "supervisors" / "member-2.json"
    path.write_text(
        json.dumps({**json.loads((path.parent / "member-0.json").read_text()), "node": 2, "hostname": "far"})
    )
    lab.pass_seconds(7, one)
    assert one.lost_hosts() == {"far"}, "node 0 was on this host, which lives"


def test_damaged_files_are_no_members(tmp_path):
    lab = Lab(tmp_path)
    zero = lab.start(0)
    (tmp_path / "supervisors" / "member-1.json").write_text("{")
    (tmp_path / "supervisors" / "member-2.json").write_text('{"other": 1}')
    (tmp_path / "supervisors" / "world-1.json").write_text("[]")
    lab.pass_seconds(2, zero)
    assert zero.living == [0] and zero.world is None


def test_the_address_towards_a_host():
    assert own_address("127.0.0.1", 29500) == "127.0.0.1"
    assert own_address("no such host", 29500) == "no such host"
