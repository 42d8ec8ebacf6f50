"""Exchanges of expert parallelism that overlap with compute: the same values, and launched ahead of it."""

from unittest.mock import patch

import pytest
import torch
from tests.support.equivalence import prove
from tests.support.layouts import Layout
from tests.support.runs import MODELS
from tests.support.soak import soak
from torch import nn

from meshwright.mesh import build_mesh
from meshwright.models.layers.moe import Moe
from meshwright.ops.async_rows import RowExchange
from meshwright.parallel.ep import apply_moe
from meshwright.rehearse.rank_pool import this_world
from meshwright.spec import MemorySpec, ParallelSpec


def _layout(overlap: str, model: str, **parallel: object) -> Layout:
    sharded = {"dp_shard": 2, "zero": 1} | parallel
    return Layout(ParallelSpec.model_validate({"ep": 2, "ep_overlap": overlap} | sharded), model)


LAYOUTS = [
    _layout("shared", "moe_shared"),
    _layout("halves", "moe_shared", zero=2),
    _layout("shared", "moe_shared", zero=3),
    _layout("halves", "moe", zero=3),
    _layout("halves", "moe_capacity"),
    _layout("shared", "moe_shared", tp=2),
    _layout("halves", "moe", tp=2, etp=2),
    _layout("shared", "moe_shared", tp=2, etp=2),
    _layout("shared", "moe_shared", pp=2),
    _layout("halves", "moe", pp=2, schedule="zbv", virtual_stages=2),
]


# With two axes besides, one of the two overlaps is enough for `make test`.
WIDE = [LAYOUTS[index] for index in (1, 3, 6, 8)]


@pytest.mark.parametrize(
    "layout", [soak(one, id=one.name) if one in WIDE else pytest.param(one, id=one.name) for one in LAYOUTS]
)
def test_every_layout_trains_the_same(ranks, layout):
    prove(ranks, layout.run())


@pytest.mark.parametrize(
    ("overlap", "recompute"),
    [("shared", "full"), ("halves", "selective"), soak("shared", "selective"), soak("halves", "full")],
)
def test_recompute_exchanges_again(ranks, overlap, recompute):
    run = _layout(overlap, "moe_shared").run()
    prove(ranks, run.with_(memory=MemorySpec(recompute=recompute)))


FORWARD_AND_BACKWARD = {
    # Rows and their weights are two exchanges to the experts, and one back.
    "shared": [
        *("launch", "launch", "shared", "wait", "wait", "experts", "launch", "wait"),
        *("launch", "wait", "experts", "launch", "launch", "shared", "wait", "wait"),
    ],
    "halves": [
        *("launch", "launch", "launch", "launch", "shared"),
        *("wait", "wait", "experts", "launch", "wait", "wait", "experts", "launch", "wait", "wait"),
        *("launch", "launch", "wait", "experts", "launch", "launch"),
        *("wait", "experts", "launch", "launch", "shared", "wait", "wait", "wait", "wait"),
    ],
}


@pytest.mark.parametrize("overlap", FORWARD_AND_BACKWARD)
def test_compute_runs_between_launch_and_wait(ranks, overlap):
    for events in ranks.run(_events, 2, overlap):
        assert events == FORWARD_AND_BACKWARD[overlap]


def _events(overlap: str) -> list[str]:
    """Launches, waits and experts in the order in which one forward and backward runs them."""
    mesh = build_mesh(_layout(overlap, "moe_shared").parallel, this_world())
    spec = MODELS["moe_shared"]
    assert spec.moe is not None
    layer = Moe(spec.moe, spec.width)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    for name, parameter in list(layer.experts.named_parameters()):
        setattr(layer.experts, name, nn.Parameter(parameter.detach().chunk(2)[mesh.rank]))
    apply_moe(layer, mesh)
    events: list[str] = []
    start, finish = RowExchange.start, RowExchange.finish
    for name in ("shared", "experts"):
        module = layer.get_submodule(name)
        module.register_forward_hook(lambda *_, name=name: events.append(name))
        module.register_full_backward_hook(lambda *_, name=name: events.append(name))
    with (
        patch.object(RowExchange, "start", lambda *args: (events.append("launch"), start(*args))[1]),
        patch.object(RowExchange, "finish", lambda *args: (events.append("wait"), finish(*args))[1]),
    ):
        x_BSD = torch.randn(2, 16, spec.width, requires_grad=True)
        layer(x_BSD).sum().backward()
    return events
