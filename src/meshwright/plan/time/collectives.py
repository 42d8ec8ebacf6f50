"""Seconds of a collective on the links that it crosses: an alpha-beta model of rings and trees.

A group of n ranks with stride w (the distance between neighbours of the group) has `inside` ranks on one
node. Inside a node it uses the peer link. Across nodes each of its ranks on a node drives its own network
adapter, so a node sends at the rate of `inside` adapters, at most at that of the peer link.
"""

import math
from dataclasses import dataclass

import numpy as np

from meshwright.hardware.catalogue import Cluster, Link
from meshwright.plan.workload.layouts import Floats, Ints, Layouts

# Share of the data-sheet rate that large collectives reach: NVLink bus bandwidth of nccl-tests on DGX A100
# and H100 (235 of 300, 370 of 450 GB/s), InfiniBand with protocol and routing losses.
PEER_EFFICIENCY = 0.78
NETWORK_EFFICIENCY = 0.80
LAUNCH_SECONDS = 8e-6
# Bandwidth of tree algorithms against rings.
TREE_EFFICIENCY = 0.9


@dataclass(frozen=True)
class Group:
    """Number of ranks of one collective, and of those that share a node."""

    ranks: Floats
    inside: Floats

    @property
    def nodes(self) -> Floats:
        """Number of nodes that the group spans."""
        return self.ranks / self.inside


def group(size: Ints, stride: Ints, cluster: Cluster) -> Group:
    """The group of `size` ranks, `stride` apart, on nodes of this cluster."""
    fit = np.maximum(cluster.devices_per_node // np.maximum(stride, 1), 1)
    return Group(size.astype(np.float64), np.minimum(fit, size).astype(np.float64))


@dataclass(frozen=True)
class Groups:
    """The groups of every axis of a layout, tp innermost."""

    tp: Group
    cp: Group
    shard: Group
    """dp_shard x cp: the ranks that ZeRO shards the state over."""
    replicate: Group
    data: Group
    """dp_replicate x dp_shard x cp: the ranks that gradients are reduced over."""
    expert: Group
    expert_data: Group


def axis_groups(at: Layouts, cluster: Cluster) -> Groups:
    """The group of every axis, from the mesh order pp, dp_replicate, dp_shard, cp, tp."""
    one = np.ones_like(at.tp)
    shards = at.dp_shard * at.cp
    expert_stride = np.where(at.etp > 1, at.tp, one)
    experts_in_tp = np.where(at.etp > 1, one, at.tp)
    return Groups(
        tp=group(at.tp, one, cluster),
        cp=group(at.cp, at.tp, cluster),
        shard=group(shards, at.tp, cluster),
        replicate=group(at.dp_replicate, at.tp * shards, cluster),
        data=group(at.dp * at.cp, at.tp, cluster),
        expert=group(at.ep, expert_stride, cluster),
        expert_data=group(
            np.maximum(at.dp * at.cp * experts_in_tp // at.ep, 1), at.ep * expert_stride, cluster
        ),
    )


def _rate(link: Link, efficiency: float) -> float:
    return link.bytes_per_second * (efficiency if link.efficiency is None else link.efficiency)


def bandwidth(members: Group, cluster: Cluster, adapters: float = math.inf) -> Floats:
    """Bytes per second of a ring over this group, with at most this many network adapters of a node."""
    peer = _rate(cluster.peer, PEER_EFFICIENCY)
    network = _rate(cluster.network, NETWORK_EFFICIENCY)
    across = np.minimum(members.inside, adapters) * network
    return np.where(members.nodes > 1, np.minimum(across, peer), peer)


def ring_latency(members: Group, cluster: Cluster) -> Floats:
    """Seconds of the n - 1 hops of a ring."""
    across = np.where(members.nodes > 1, members.nodes, 0.0)
    near = np.maximum(members.ranks - 1 - across, 0.0)
    return LAUNCH_SECONDS + near * cluster.peer.latency_seconds + across * cluster.network.latency_seconds


def gather_seconds(
    num_bytes: Floats,
    members: Group,
    cluster: Cluster,
    *,
    messages: Floats | float = 1.0,
    adapters: float = math.inf,
    by_tree: bool = False,
) -> Floats:
    """All-gather or reduce-scatter of `num_bytes` in this many messages; zero for a group of one.

    `by_tree`: a group with one rank per node may use binomial trees, log n hops, where that is faster.
    """
    moved = (members.ranks - 1) / members.ranks * num_bytes / bandwidth(members, cluster, adapters)
    seconds = messages * ring_latency(members, cluster) + moved
    if by_tree:
        hops = np.log2(np.maximum(members.nodes, 2.0)) * cluster.network.latency_seconds
        tree = messages * (LAUNCH_SECONDS + hops) + moved / TREE_EFFICIENCY
        seconds = np.where(members.inside == 1, np.minimum(seconds, tree), seconds)
    return np.where(members.ranks > 1, seconds, 0.0)


def all_reduce_seconds(
    num_bytes: Floats, members: Group, cluster: Cluster, *, messages: Floats | float = 1.0
) -> Floats:
    """The faster of a ring (twice a gather) and a tree (2 log n hops, the same bytes)."""
    ring = 2.0 * gather_seconds(num_bytes, members, cluster, messages=messages)
    hops = 2.0 * np.log2(np.maximum(members.nodes, 2.0)) * cluster.network.latency_seconds
    near = 2.0 * (members.inside - 1) * cluster.peer.latency_seconds
    latency = messages * (LAUNCH_SECONDS + hops + near)
    tree = latency + 2.0 * num_bytes / (TREE_EFFICIENCY * bandwidth(members, cluster))
    return np.where(members.ranks > 1, np.minimum(ring, np.where(members.nodes > 1, tree, ring)), 0.0)


def all_to_all_seconds(
    num_bytes: Floats, members: Group, cluster: Cluster, *, far_copies: Floats | float = 1.0
) -> Floats:
    """Each rank sends num_bytes / n to every other rank, on the peer link and on its network adapter.

    `far_copies` is the share of the bytes for other nodes that cross the network.
    """
    near = (members.inside - 1) / members.ranks * num_bytes / _rate(cluster.peer, PEER_EFFICIENCY)
    far_share = far_copies * (members.ranks - members.inside) / members.ranks
    far = far_share * num_bytes / _rate(cluster.network, NETWORK_EFFICIENCY)
    latency = LAUNCH_SECONDS + np.where(members.nodes > 1, 2.0, 1.0) * cluster.network.latency_seconds
    return np.where(members.ranks > 1, latency + np.maximum(near, far), 0.0)


def send_seconds(num_bytes: Floats, at: Layouts, cluster: Cluster) -> Floats:
    """One message to the next pipeline rank, across nodes where any stage boundary is."""
    inside = at.num_ranks <= cluster.devices_per_node
    near = cluster.peer.latency_seconds + num_bytes / _rate(cluster.peer, PEER_EFFICIENCY)
    far = cluster.network.latency_seconds + num_bytes / _rate(cluster.network, NETWORK_EFFICIENCY)
    seconds = LAUNCH_SECONDS + np.where(inside, near, far)
    return np.where(at.pp > 1, seconds, 0.0)
