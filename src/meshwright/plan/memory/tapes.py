"""What the tape of a block says: of a dense one or of one with routed experts."""

import numpy as np

from meshwright.plan.memory.block_sizes import Sizes
from meshwright.plan.memory.block_tape import BlockTape
from meshwright.plan.memory.routed_tape import RoutedTape
from meshwright.plan.memory.tape import Items
from meshwright.plan.workload.layouts import Floats


def _tape_of(sizes: Sizes) -> BlockTape:
    return BlockTape(sizes) if sizes.routed is None else RoutedTape(sizes, sizes.routed)


def kept_bytes(sizes: Sizes) -> tuple[Floats, Floats]:
    """What a block keeps of one micro-batch: activations, and weights cast to the format of compute."""
    tape = _tape_of(sizes)
    tape.keep()
    tape.look()
    zero = np.zeros(len(sizes.x))
    return tape.peak.get("activations", zero), tape.peak.get("cast weights", zero)


def reach_the_mask(sizes: Sizes) -> Items:
    """What a block holds at the fullest moment of making its mask in forward."""
    tape = _tape_of(sizes)
    tape.reach_the_mask()
    return tape.peak


def run_backward(sizes: Sizes) -> BlockTape:
    """The tape of a block's backward, what it kept included."""
    tape = _tape_of(sizes)
    tape.keep()
    tape.backward()
    return tape
