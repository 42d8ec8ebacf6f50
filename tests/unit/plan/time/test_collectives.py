"""Collectives on the links they cross."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.hardware import parse_cluster
from meshwright.plan.time import collectives as traffic
from meshwright.plan.workload.layouts import layouts

CLUSTER = parse_cluster("dgx-h100:16")
GIB = np.full(1, float(2**30))


def _group(size: int, stride: int) -> traffic.Group:
    return traffic.group(np.array([size]), np.array([stride]), CLUSTER)


def test_a_group_of_one_costs_nothing() -> None:
    alone = _group(1, 1)
    for price in (traffic.gather_seconds, traffic.all_reduce_seconds, traffic.all_to_all_seconds):
        assert price(GIB, alone, CLUSTER)[0] == 0


def test_groups_follow_the_mesh_order() -> None:
    groups = traffic.axis_groups(layouts(tp=4, cp=2, dp_shard=4, pp=2), CLUSTER)
    assert (groups.tp.inside[0], groups.tp.nodes[0]) == (4, 1)
    # cp starts every 4 ranks, so both of its ranks share a node; dp_shard x cp has two ranks per node.
    assert (groups.cp.inside[0], groups.cp.nodes[0]) == (2, 1)
    assert (groups.shard.inside[0], groups.shard.nodes[0]) == (2, 4)


def test_the_network_is_slower_than_the_node() -> None:
    inside = traffic.gather_seconds(GIB, _group(8, 1), CLUSTER)[0]
    across_one_rail = traffic.gather_seconds(GIB, _group(8, 8), CLUSTER)[0]
    assert across_one_rail > 5 * inside


def test_ranks_of_one_node_use_their_own_adapters() -> None:
    """16 ranks on two nodes move data on eight adapters, 16 on sixteen nodes on one."""
    dense = traffic.gather_seconds(GIB, _group(16, 1), CLUSTER)[0]
    spread = traffic.gather_seconds(GIB, _group(16, 8), CLUSTER)[0]
    assert spread > 5 * dense


def test_all_reduce_moves_twice_a_gather() -> None:
    members = _group(8, 1)
    gather = traffic.gather_seconds(GIB, members, CLUSTER)[0]
    assert traffic.all_reduce_seconds(GIB, members, CLUSTER)[0] == pytest.approx(2 * gather)


def test_many_small_messages_pay_latency_each() -> None:
    members = _group(64, 8)
    one = traffic.gather_seconds(GIB, members, CLUSTER)[0]
    many = traffic.gather_seconds(GIB, members, CLUSTER, messages=100.0)[0]
    assert many - one == pytest.approx(99 * traffic.ring_latency(members, CLUSTER)[0])


@given(
    size=st.sampled_from([2, 4, 8, 16, 64]), stride=st.sampled_from([1, 2, 4, 8, 16]), scale=st.floats(1, 100)
)
def test_more_bytes_never_take_less_time(size: int, stride: int, scale: float) -> None:
    members = _group(size, stride)
    for price in (traffic.gather_seconds, traffic.all_reduce_seconds, traffic.all_to_all_seconds):
        assert price(scale * GIB, members, CLUSTER)[0] >= price(GIB, members, CLUSTER)[0]
