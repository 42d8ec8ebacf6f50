"""Bytes of state per parameter, as the table of optimizers promises and the planner prices."""

import pytest
import torch
from torch import nn

from meshwright.optim.build import build_optimizer, state_tensors
from meshwright.plan.workload.workload import OPTIMIZER_BYTES
from meshwright.spec import OptimSpec

# Values beside the states of a [1024, 1024] matrix: a scale per 256 elements and moment, or one number per
# row and per column.
BESIDE = {"adamw_8bit": 2 * 4 / 256, "adafactor": 2 * 4 / 1024}


def bytes_per_parameter(optim: OptimSpec) -> float:
    named = {"matrix": nn.Parameter(torch.zeros(1024, 1024))}
    states = state_tensors(build_optimizer(named, optim), named, optim)["matrix"]
    return sum(state.nbytes for state in states.values()) / 1024**2


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("adamw", 8.0),
        ("adamw_8bit", 2.0),
        ("sgd", 4.0),
        ("adafactor", 4.0),
        ("lars", 4.0),
        ("lamb", 8.0),
        ("muon", 4.0),
    ],
)
def test_table(kind, expected):
    assert bytes_per_parameter(OptimSpec(kind=kind)) == expected + BESIDE.get(kind, 0.0)
    assert OPTIMIZER_BYTES[kind] == expected


@pytest.mark.parametrize("kind", ("sgd", "lars", "adafactor"))
def test_without_a_first_moment_almost_nothing_is_stored(kind):
    optim = OptimSpec(kind=kind, beta1=0.0)
    assert bytes_per_parameter(optim) == BESIDE.get(kind, 0.0)
    assert optim.is_stateless
