"""What offload moves: bytes that leave the device, bytes that stay there, seconds on the host link.

    optimizer     states live on the host; two buckets (a matrix each) are on the device during the update
    parameters    blocks live on the host; two of them are on the device; embedding and head stay.
                  With ZeRO-3 every shard and its gradient live on the host, and the update runs there
    activations   what a block's backward needs lives on the host; two blocks of one micro-batch are here
    embedding     a frozen token table lives on the host; the device reads rows of it

The runtime asks the same formulas for the host memory that it will need.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.plan.workload.layouts import Floats, Layouts

Items = dict[str, Floats]
# One is in use while the other comes or goes.
ON_DEVICE_AT_ONCE = 2.0
# Host memory that a run may use; the rest is for the system, the loader and the page cache.
HOST_SHARE = 0.9


@dataclass(frozen=True)
class Movable:
    """What of a rank's bytes offload can reach; shape (N, 3) or (N, 1)."""

    block_share: Floats
    """Part of the rank's weights that belongs to blocks."""
    layers: Floats
    in_flight: Floats
    layer_activations: Floats
    """Bytes of one layer and one micro-batch."""
    largest_states: Floats
    """Optimizer bytes of the two largest buckets that follow each other."""
    embedding: Floats
    """Bytes of the token table."""


def column(values: Floats) -> Floats:
    """Of each layout, for all its pipeline ranks."""
    return np.asarray(values, dtype=np.float64)[:, None]


def move_states(items: Mapping[str, Floats], at: Layouts, movable: Movable) -> tuple[Items, Items]:
    """State items on the device and on the host."""
    here, host = dict(items), Items()
    optimizer, weights = column(at.offloads("optimizer")), column(at.offloads("parameters"))
    for name in ("optimizer", "master"):
        if name in here:
            host[name] = optimizer * here[name]
            here[name] = here[name] - host[name]
    sharded = column(at.zero == 3)
    moved = weights * here["weights"] * np.where(sharded > 0, 1.0, movable.block_share)
    some = np.minimum(ON_DEVICE_AT_ONCE / np.maximum(movable.layers, 1.0), 1.0)
    host["parameters"] = moved
    host["embedding"] = column(at.offloads("embedding")) * movable.embedding
    left = here["weights"] - moved * np.where(sharded > 0, 1.0, 1.0 - some)
    here["weights"] = left - host["embedding"]
    if "gradients" in here:
        host["gradients"] = weights * sharded * here["gradients"]
        here["gradients"] = here["gradients"] - host["gradients"]
    return here, host


def moved_activations(at: Layouts, movable: Movable) -> Floats:
    """Bytes of activations on the host at the peak."""
    blocks = movable.in_flight * movable.layers
    return column(at.offloads("activations")) * blocks * movable.layer_activations


def move_activations(items: Items, at: Layouts, movable: Movable, *, is_traced: NDArray[np.bool_]) -> None:
    """Take activations off the device; what only the update needs counts where they were not as large.

    Where the peak comes from the trace's table, each of its phases has them off the device already.
    """
    is_moved = column(at.offloads("activations"))
    stays = np.minimum(ON_DEVICE_AT_ONCE, movable.in_flight * movable.layers) * movable.layer_activations
    left = items["activations"] - moved_activations(at, movable) + is_moved * stays
    items["activations"] = np.where(is_traced[:, None], items["activations"], np.maximum(left, 0.0))
    pool = column(at.offloads("optimizer")) * movable.largest_states
    items["offload buffers"] = np.maximum(pool - items["activations"] - items["logits"], 0.0)
