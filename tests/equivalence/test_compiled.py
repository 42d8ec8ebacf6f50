"""Compiled blocks equal one eager device on every axis: what the compiler traces, splits and saves is right.

Graphs, decompositions and the partition into forward and backward are those of `torch.compile`; their
operators then run one by one, because making kernels takes minutes and float64 of the CPU's is not complete.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import pytest
import torch
from tests.support.equivalence import assert_same_training
from tests.support.layouts import DENSE, ROUTED, Layout, all_pairs, all_singles, named_mixes
from tests.support.oracle import reference

from meshwright.mesh import build_mesh
from meshwright.rehearse.rank_pool import RankPool, this_world
from meshwright.rehearse.steps import Trained, train_steps
from meshwright.spec import MemorySpec, ParallelSpec, RunSpec
from meshwright.spec.advice import blocks_are_compiled
from meshwright.spec.check import check, require_valid

RANKS_IMPORT = ("torch._inductor.compile_fx",)
BACKEND = "aot_eager_decomp_partition"
RECOMPUTE = ("none", "selective", "full")


@contextmanager
def _without_kernels() -> Iterator[None]:
    torch.compiler.reset()
    with patch.object(torch, "compile", partial(torch.compile, backend=BACKEND)):
        yield
    torch.compiler.reset()


def _train_compiled(run: RunSpec, num_steps: int) -> tuple[Trained, int]:
    """And the number of graphs that were made."""
    counters = torch._dynamo.utils.counters
    with _without_kernels():
        counters.clear()
        result = train_steps(run, build_mesh(run.parallel, this_world()), num_steps)
        return result, counters["stats"]["unique_graphs"]


def prove(
    ranks: RankPool, layout: Layout, *, recompute: str = "none", device: str = "cpu", num_steps: int = 3
) -> int:
    """The fewest graphs that a rank made."""
    return prove_run(ranks, layout.run(), recompute=recompute, device=device, num_steps=num_steps)


def prove_run(ranks: RankPool, plain: RunSpec, *, recompute: str, device: str, num_steps: int) -> int:
    """The fewest graphs that a rank made; `plain` is not compiled."""
    run = plain.with_(compile=True, memory=MemorySpec(recompute=recompute), device=device)
    require_valid(run)
    answers = ranks.run(_train_compiled, run.parallel.num_ranks, run, num_steps)
    assert _stays_uncompiled(run) or all(num_graphs > 0 for _, num_graphs in answers)
    expected = reference(plain, num_steps=num_steps)
    assert_same_training([result for result, _ in answers], expected)
    return min(num_graphs for _, num_graphs in answers)


def _stays_uncompiled(run: RunSpec) -> bool:
    """Whether `check` says that blocks do; dense ones of a routed model are compiled all the same."""
    return any(blocks_are_compiled(run))


def each(layouts: list[Layout]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("layout", layouts, ids=[layout.name for layout in layouts])


ONE_DEVICE = [Layout(ParallelSpec(), kind, 4) for kind in ("gqa", "mla", "moe")]
EVERY_KIND = [Layout(ParallelSpec(), kind, 2) for kind in (*DENSE, *ROUTED)]
EACH_AXIS = [
    Layout(ParallelSpec(dp_replicate=2), "gpt"),
    Layout(ParallelSpec(dp_shard=2, zero=2), "tied"),
    Layout(ParallelSpec(dp_shard=2, zero=3), "gqa"),
    Layout(ParallelSpec(cp=2), "gqa"),
    Layout(ParallelSpec(cp=2, cp_kind="ring"), "gpt"),
    Layout(ParallelSpec(cp=2, cp_kind="ulysses"), "tied"),
    Layout(ParallelSpec(tp=2), "gpt"),
    Layout(ParallelSpec(pp=2), "moe_shared"),
    Layout(ParallelSpec(pp=2, schedule="interleaved_1f1b", virtual_stages=2), "tied"),
    Layout(ParallelSpec(dp_shard=2, zero=1, ep=2), "moe"),
    Layout(ParallelSpec(dp_shard=2, zero=3, tp=2), "gqa"),
]
# ep is compiled inside full recompute below. Of a pipeline, routers record several micro-batches in flight.
QUICK = {"cp2-gqa", "tp2-gpt", "pp2-moe_shared", "dp_shard2-zero3-gqa"}


# gqa and gpt are compiled below, with an axis each.
@each([layout for layout in ONE_DEVICE if layout.model != "gqa"])
def test_each_kind_of_model(ranks: RankPool, layout: Layout) -> None:
    prove(ranks, layout, num_steps=2)


@each([layout for layout in EACH_AXIS if layout.name in QUICK])
def test_each_axis(ranks: RankPool, layout: Layout) -> None:
    prove(ranks, layout, num_steps=2)


@pytest.mark.parametrize("overlap", (pytest.param("none", marks=pytest.mark.soak), "halves"))
def test_parts_are_compiled_inside_full_recompute(ranks: RankPool, overlap: str) -> None:
    """Experts on other ranks: the exchange waits for the host, inside recompute as well."""
    parallel = ParallelSpec.model_validate({"dp_shard": 2, "zero": 1, "ep": 2, "ep_overlap": overlap})
    run = Layout(parallel, "moe_shared").run()
    run = run.with_(model=run.model.with_(num_layers=2))  # one dense block and one routed
    num_graphs = prove_run(ranks, run, recompute="full", device="cpu", num_steps=2)
    # The dense block is one. Of a routed block norms, attention, router, experts and shared experts are.
    assert num_graphs >= 6


@pytest.mark.parametrize("layout", [Layout(ParallelSpec(cp=2, cp_kind="ring"), "window")], ids=["ring"])
def test_parts_around_a_ring_are_compiled_inside_full_recompute(ranks: RankPool, layout: Layout) -> None:
    run = layout.run()
    run = run.with_(model=run.model.with_(num_layers=1))
    num_graphs = prove_run(ranks, run, recompute="full", device="cpu", num_steps=2)
    assert num_graphs >= 4  # both norms, the MLP, and what is around the ring


@pytest.mark.soak
@pytest.mark.parametrize("recompute", RECOMPUTE)
@each(list(dict.fromkeys([*EVERY_KIND, *EACH_AXIS, *all_singles(), *all_pairs(), *named_mixes()])))
def test_each_pair_of_axes(ranks: RankPool, layout: Layout, recompute: str) -> None:
    refused = check(layout.run().with_(compile=True, memory=MemorySpec(recompute=recompute)))
    if refused:  # split-backward schedules are not compiled
        pytest.skip(refused[0].fact)
    prove(ranks, layout, recompute=recompute)
