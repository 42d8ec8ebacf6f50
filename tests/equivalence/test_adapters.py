"""Adapters on any mesh train what the merged weights W + scale B A train on one device."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from tests.equivalence import test_compiled
from tests.support.equivalence import assert_same_training, prove, run_case
from tests.support.layouts import DENSE, ROUTED, Layout, all_pairs, all_singles, named_mixes
from tests.support.oracle import reference
from tests.support.runs import MODELS, MORE_OPTIMIZERS, OPTIMIZERS, few_microbatches, tiny_run

from meshwright.rehearse.rank_pool import RankPool
from meshwright.spec import AdapterSpec, MemorySpec, OptimSpec, ParallelSpec, RunSpec
from meshwright.spec.check import check

# A rank that no group of ranks divides, and a scale that is neither 1 nor alpha.
LORA = AdapterSpec(rank=3, alpha=8)
RSLORA, DORA = LORA.with_(kind="rslora"), LORA.with_(kind="dora")


def adapted(layout: Layout, adapter: AdapterSpec = LORA, **changes: object) -> RunSpec:
    return layout.run().with_(adapter=adapter, **changes)


def layout(kind: str, **parallel: object) -> Layout:
    return Layout(ParallelSpec.model_validate(parallel), kind)


CASES = {
    "gqa": adapted(layout("gqa"), RSLORA),
    "gpt-dora": adapted(layout("gpt"), DORA),
    "gqa-offload": adapted(
        layout("gqa"), memory=MemorySpec(offload=("optimizer", "activations", "parameters"))
    ),
    "pp2-gqa-embedding-offload": adapted(
        layout("gqa", pp=2),
        LORA.with_(targets=("all-linear", "embedding")),
        memory=MemorySpec(offload=("embedding",)),
    ),
    "mla": adapted(layout("mla"), LORA.with_(ranks=[{"pattern": "kv_up", "rank": 2, "alpha": 5}])),
    "moe_shared": adapted(layout("moe_shared")),
    "tp2-gpt-dora": adapted(layout("gpt", tp=2), DORA),
    "tp2-mla": adapted(layout("mla", tp=2), memory=MemorySpec(regather_tp_inputs=True)),
    "tp2-etp2-moe_shared": adapted(layout("moe_shared", tp=2, etp=2)),
    "zero3-tp2-etp2-moe-dora": adapted(layout("moe", dp_shard=2, zero=3, tp=2, etp=2), DORA),
    "ep2-moe_shared-dora": adapted(layout("moe_shared", dp_shard=2, zero=1, ep=2), DORA),
    "zero1-ep2-moe": adapted(layout("moe", dp_shard=2, zero=1, ep=2)),
    "zero2-gqa": adapted(layout("gqa", dp_shard=2, zero=2), optim=OPTIMIZERS["adamw"]),
    "zero3-gqa-dora": adapted(layout("gqa", dp_shard=2, zero=3), DORA),
    "cp2-gqa-recompute": adapted(layout("gqa", cp=2), memory=MemorySpec(recompute="full")),
    "pp2-tied": adapted(layout("tied", pp=2)),
    "zero3-tp2-gqa": adapted(layout("gqa", dp_shard=2, zero=3, tp=2)),
}


# Second variants of what the others have in pairs; soak runs all.
SECOND = ("ep2-moe_shared-dora", "gpt-dora", "gqa-offload", "mla", "moe_shared", "zero2-gqa", "zero3-tp2-gqa")


def quick(cases: Iterable[str], second: Sequence[str]) -> list[Any]:
    """The cases as parameters; second variants are marked soak."""
    return [pytest.param(one, marks=pytest.mark.soak if one in second else ()) for one in cases]


@pytest.mark.parametrize("case", quick(CASES, SECOND))
def test_adapters_equal_merged_weights(ranks: RankPool, case: str) -> None:
    prove(ranks, CASES[case])


@pytest.mark.parametrize("block", [pytest.param(0, marks=pytest.mark.soak), 2])
def test_a_stage_may_have_nothing_to_train(ranks: RankPool, block: int) -> None:
    """Adapters in one block alone: the other stage only passes activations and their gradients on."""
    prove(ranks, adapted(layout("tied", pp=2), LORA.with_(targets=(f"blocks.{block}.attention.*",))))


def test_some_parameters_are_trained_beside_adapters(ranks: RankPool) -> None:
    prove(ranks, adapted(layout("tied", pp=2), train_only=("*norm*", "embedding.tokens.weight")))


def test_full_fine_tuning_of_some_parameters(ranks: RankPool) -> None:
    run = layout("gqa", dp_shard=2, zero=1).run().with_(train_only=("blocks.1.*", "head.weight"))
    results = prove(ranks, run)
    assert all(name.startswith(("blocks.1.", "head.")) for name in results[0].gradients[0])


def test_lora_plus_is_a_parameter_group(ranks: RankPool) -> None:
    groups = [{"pattern": "*.lora_B", "lr_factor": 16.0}]
    optim = OptimSpec.model_validate({**OPTIMIZERS["adamw"].model_dump(), "groups": groups, "lr": 1e-3})
    prove(ranks, adapted(layout("gqa"), optim=optim))


def test_frozen_weights_have_no_gradient_and_no_state(ranks: RankPool) -> None:
    run = adapted(layout("gqa", dp_shard=2, zero=1), optim=OPTIMIZERS["adamw"].with_(ema_decay=0.5))
    results = run_case(ranks, run)
    assert_same_training(results, reference(run))
    assert all(".adapter." in name for name in results[0].gradients[0])
    assert all(".adapter." in name for name in (*results[0].optimizer, *results[0].ema))


# Widths that tp leaves multiples of a block of NF4, and biases.
WIDE = MODELS["gqa"].with_(
    width=64,
    attention=MODELS["gqa"].attention.with_(num_heads=8, head_width=16, qkv_bias=True),
    mlp=MODELS["gqa"].mlp.with_(width=128),
)
WIDE_EXPERTS = WIDE.with_(moe=MODELS["moe_shared"].moe.with_(width=128, shared_width=128))
NESTED = LORA.with_(base="nf4_nested")
# More than 256 absmax in a matrix: tp ranks read other parts of its nested table.
WIDER = WIDE.with_(mlp=WIDE.mlp.with_(width=512))
WIDER_EXPERTS = WIDE_EXPERTS.with_(moe=WIDE_EXPERTS.moe.with_(width=384))
QLORA = {
    "moe": ({}, LORA, {"model": WIDE_EXPERTS}),
    "moe-ep2-zero3": (
        {"dp_shard": 4, "zero": 3, "ep": 2},
        LORA,
        {"model": WIDE_EXPERTS, "memory": MemorySpec(recompute="selective")},
    ),
    "moe-tp2-etp2": ({"tp": 2, "etp": 2}, LORA.with_(targets=("down", "query")), {"model": WIDE_EXPERTS}),
    "moe-dora": ({}, DORA, {"model": WIDE_EXPERTS}),
    "moe-nested": ({}, NESTED, {"model": WIDER_EXPERTS}),
    "moe-nested-compiled": ({}, NESTED, {"model": WIDER_EXPERTS, "compile": True}),
    "moe-ep2-halves-compiled-offload": (
        {"dp_shard": 2, "zero": 1, "ep": 2, "ep_overlap": "halves"},
        LORA,
        {"model": WIDE_EXPERTS, "compile": True, "memory": MemorySpec(offload=("activations",))},
    ),
    "moe-nested-ep2-zero3-dora": (
        {"dp_shard": 4, "zero": 3, "ep": 2},
        NESTED.with_(kind="dora"),
        {"model": WIDER_EXPERTS, "memory": MemorySpec(recompute="selective")},
    ),
    "moe-nested-zero3-tp2-etp2": (
        {"dp_shard": 2, "zero": 3, "tp": 2, "etp": 2},
        NESTED,
        {"model": WIDER_EXPERTS, "memory": MemorySpec(recompute="full")},
    ),
    "moe-nested-pp2-dora": ({"pp": 2}, NESTED.with_(kind="dora"), {"model": WIDER_EXPERTS}),
    "moe-nested-ep2-etp2": (
        {"dp_shard": 2, "zero": 1, "tp": 2, "ep": 2, "etp": 2},
        NESTED,
        {"model": WIDER_EXPERTS},
    ),
    "one": ({}, LORA, {}),
    "nested-compiled": ({}, NESTED, {"compile": True, "model": WIDER}),
    "nested-zero3-tp2-dora": (
        {"dp_shard": 2, "zero": 3, "tp": 2},
        NESTED.with_(kind="dora"),
        {"model": WIDER, "memory": MemorySpec(recompute="full")},
    ),
    "one-compiled": ({}, LORA, {"compile": True}),
    "tp2-dora": ({"tp": 2}, DORA, {}),
    "zero3": ({"dp_shard": 2, "zero": 3}, LORA, {"memory": MemorySpec(recompute="full")}),
    "zero3-tp2": ({"dp_shard": 2, "zero": 3, "tp": 2}, LORA.with_(targets=("query", "down")), {}),
}


def only_adapters(trained: Any) -> Any:
    """The results without the base, which is packed in one and full in the other."""
    adapters = {name: one for name, one in trained.weights.items() if ".adapter" in name}
    return dataclasses.replace(trained, weights=adapters)


SECOND_QLORA = (
    *("moe", "moe-dora", "one", "nested-compiled", "zero3", "zero3-tp2"),
    *("moe-nested", "moe-nested-compiled", "moe-nested-pp2-dora", "moe-nested-ep2-etp2"),
    "moe-ep2-halves-compiled-offload",
)


@pytest.mark.parametrize("case", quick(QLORA, SECOND_QLORA))
def test_a_base_in_nf4(ranks: RankPool, case: str) -> None:
    """Adapters equal those on the dequantised weights; every rank holds its part of the packed base."""
    parallel, adapter, changes = QLORA[case]
    axes = ParallelSpec.model_validate(parallel)
    run = tiny_run(
        changes.get("model", WIDE),
        parallel=axes,
        microbatch_sequences=few_microbatches(axes),
        adapter=adapter if adapter.base != "weights" else adapter.with_(base="nf4"),
        **{name: one for name, one in changes.items() if name == "memory"},
    )
    if "compile" in changes:
        answers = ranks.run(test_compiled._train_compiled, axes.num_ranks, run.with_(compile=True), 3)
        results = [result for result, _ in answers]
    else:
        results = run_case(ranks, run)
    routed = run.model.moe is not None
    name = "blocks.1.mlp.experts.down" if routed else "blocks.0.mlp.down.weight"
    held = {name: one for result in results for name, one in result.weights.items()}
    assert held[name].dtype == torch.uint8
    expected = only_adapters(reference(run))
    assert_same_training([only_adapters(result) for result in results], expected)


COMPILED = [layout("gqa"), layout("gpt"), layout("gqa", dp_shard=2, zero=3)]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(one, id=one.name, marks=pytest.mark.soak if one.model == "gpt" else ())
        for one in COMPILED
    ],
)
def test_compiled_blocks_with_adapters(ranks: RankPool, case: Layout) -> None:
    run = adapted(case, compile=True, memory=MemorySpec(recompute="selective"))
    answers = ranks.run(test_compiled._train_compiled, run.parallel.num_ranks, run, 3)
    assert_same_training([result for result, _ in answers], reference(run))


EVERY = list(dict.fromkeys([*all_singles(), *all_pairs(), *named_mixes()]))


@pytest.mark.soak
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
@pytest.mark.parametrize("case", EVERY, ids=[one.name for one in EVERY])
def test_every_pair_of_axes(ranks: RankPool, case: Layout, recompute: str) -> None:
    run = adapted(case, DORA, memory=MemorySpec(recompute=recompute))
    if refused := check(run):
        pytest.skip(refused[0].fact)
    prove(ranks, run)


@pytest.mark.soak
@pytest.mark.parametrize("optim", [*OPTIMIZERS, *MORE_OPTIMIZERS])
@pytest.mark.parametrize("model", [*DENSE, *ROUTED])
def test_every_optimizer(ranks: RankPool, model: str, optim: str) -> None:
    chosen = (OPTIMIZERS | MORE_OPTIMIZERS)[optim]
    run = adapted(layout(model, dp_shard=2, zero=1, tp=2), optim=chosen)
    results = run_case(ranks, run)
    # The polynomial of muon amplifies small singular values, and rounding errors with them.
    assert_same_training(results, reference(run), rtol=5e-7 if optim == "muon" else 1e-9)
