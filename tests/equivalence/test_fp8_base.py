"""A frozen base in fp8 on any mesh: in float64 with emulated matmuls every rank rounds alike."""

import dataclasses
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tests.equivalence import test_compiled
from tests.equivalence.test_fp8 import MODEL, _errors, fp8_run
from tests.support.equivalence import Result, assert_same_training, run_case, this_world, train_steps
from tests.support.fp8_by_definition import scale_of, to_bytes
from tests.support.oracle import reference, reference_model
from tests.support.runs import MODELS, tiny_run

from meshwright.mesh import build_mesh
from meshwright.models.layers import experts_stored
from meshwright.precision.fp8 import stored
from meshwright.precision.fp8.quantise import Quantised
from meshwright.rehearse.rank_pool import RankPool
from meshwright.spec import AdapterSpec, Fp8Spec, MemorySpec, ParallelSpec, PrecisionSpec, RunSpec

RTOL = 1e-9
LORA = AdapterSpec(rank=3, alpha=8, base="fp8")
DORA = LORA.with_(kind="dora")
EXPERTS = MODELS["moe_shared"].moe.with_(width=32, shared_width=32)


def base_run(adapter: AdapterSpec = LORA, **changes: Any) -> RunSpec:
    return fp8_run(**{"precision": PrecisionSpec(compute="fp64"), "adapter": adapter, **changes})


def only_adapters(results: list[Result]) -> list[Result]:
    """The results without the base, which is stored in bytes in one run and in full in the other."""
    return [
        dataclasses.replace(
            one, weights={name: tensor for name, tensor in one.weights.items() if ".adapter" in name}
        )
        for one in results
    ]


def routed(run: RunSpec) -> RunSpec:
    """The run with routed and shared experts in all blocks but the first."""
    return run.with_(model=run.model.with_(moe=EXPERTS))


@pytest.fixture(scope="module")
def alone(ranks: RankPool) -> dict[str, list[Result]]:
    """One process, by kind of adapter."""
    return {"lora": run_case(ranks, base_run()), "dora": run_case(ranks, base_run(DORA))}


@pytest.fixture(scope="module")
def routed_alone(ranks: RankPool) -> dict[str, list[Result]]:
    """One process with routed experts, by kind of adapter."""
    return {one.kind: run_case(ranks, routed(base_run(one))) for one in (LORA, DORA)}


def test_one_process_equals_the_fp8_recipe_on_full_weights(ranks: RankPool, alone) -> None:
    """`precision.fp8` casts full weights in every micro-batch; scales are powers of two, so values agree."""
    full = base_run(
        LORA.with_(base="weights"),
        precision=PrecisionSpec(compute="fp64", fp8=Fp8Spec(recipe="current", bf16_layers_each_end=0)),
    )
    expected = only_adapters(run_case(ranks, full))
    errors = _errors(only_adapters(alone["lora"]), expected)
    assert max(errors.values()) < RTOL
    weight = alone["lora"][0].weights["blocks.1.mlp.down.weight"]
    assert weight.dtype == torch.uint8
    plain = run_case(ranks, base_run(LORA.with_(base="weights")))
    assert max(_errors(only_adapters(plain), expected).values()) > 1e-3


def test_experts_in_one_process_equal_the_fp8_recipe_on_full_weights(ranks: RankPool, routed_alone) -> None:
    """`precision.fp8.experts` casts full experts in every micro-batch, each with a scale of its own."""
    fp8 = Fp8Spec(recipe="current", bf16_layers_each_end=0, experts=True)
    full = base_run(LORA.with_(base="weights"), precision=PrecisionSpec(compute="fp64", fp8=fp8))
    expected = only_adapters(run_case(ranks, routed(full)))
    ours = only_adapters(routed_alone["lora"])
    assert max(_errors(ours, expected).values()) < RTOL
    assert routed_alone["lora"][0].weights["blocks.1.mlp.experts.up"].dtype == torch.uint8
    only_linears = full.with_(precision=PrecisionSpec(compute="fp64", fp8=fp8.with_(experts=False)))
    assert max(_errors(ours, only_adapters(run_case(ranks, routed(only_linears)))).values()) > 1e-3


ROUTED_LAYOUTS = {
    "ep2-zero3-dora": ({"dp_shard": 4, "zero": 3, "ep": 2}, DORA, {"memory": MemorySpec(recompute="full")}),
    "zero3-tp2-etp2": ({"dp_shard": 2, "zero": 3, "tp": 2, "etp": 2}, LORA, {}),
    "tp2-etp2-dora": ({"tp": 2, "etp": 2}, DORA, {}),
    "pp2": ({"pp": 2}, LORA, {"memory": MemorySpec(recompute="selective")}),
    "zero3": ({"dp_shard": 2, "zero": 3}, LORA, {}),
    "ep2-etp2": ({"dp_shard": 2, "zero": 1, "tp": 2, "ep": 2, "etp": 2}, LORA, {}),
    "ep2-tp2": ({"dp_shard": 2, "zero": 1, "tp": 2, "ep": 2}, LORA, {}),
}
QUICK_ROUTED = ("ep2-zero3-dora", "zero3-tp2-etp2", "pp2")


@pytest.mark.parametrize(
    "layout",
    [pytest.param(one, marks=() if one in QUICK_ROUTED else pytest.mark.soak) for one in ROUTED_LAYOUTS],
)
def test_experts_on_every_mesh_equal_one_process(ranks: RankPool, routed_alone, layout: str) -> None:
    parallel, adapter, changes = ROUTED_LAYOUTS[layout]
    run = routed(base_run(adapter, parallel=ParallelSpec.model_validate(parallel), **changes))
    errors = _errors(run_case(ranks, run), routed_alone[adapter.kind])
    assert max(errors.values()) < RTOL, errors


LAYOUTS = {
    "tp2-dora": ({"tp": 2}, DORA, {}),
    "zero3": ({"dp_shard": 2, "zero": 3}, LORA, {"memory": MemorySpec(recompute="full")}),
    "zero1": ({"dp_shard": 2, "zero": 1}, LORA, {}),
    "pp2": ({"pp": 2}, LORA, {}),
    "cp2": ({"cp": 2}, LORA, {"memory": MemorySpec(recompute="selective")}),
    "zero3-tp2-dora": ({"dp_shard": 2, "zero": 3, "tp": 2}, DORA, {}),
    "cp2-tp2": ({"cp": 2, "tp": 2}, LORA, {}),
    "pp2-tp2": ({"pp": 2, "tp": 2}, LORA, {}),
}


QUICK = ("tp2-dora", "zero3", "pp2", "cp2", "zero3-tp2-dora")
CASES = [pytest.param(one, marks=() if one in QUICK else pytest.mark.soak) for one in LAYOUTS]


@pytest.mark.parametrize("layout", CASES)
def test_every_mesh_equals_one_process(ranks: RankPool, alone, layout: str) -> None:
    parallel, adapter, changes = LAYOUTS[layout]
    run = base_run(adapter, parallel=ParallelSpec.model_validate(parallel), **changes)
    errors = _errors(run_case(ranks, run), alone[adapter.kind])
    assert max(errors.values()) < RTOL, errors


def exact_activations(x_TK: torch.Tensor, *_: Any) -> Quantised:
    """In the place of `quantise`: activations and their gradients are not rounded."""
    return Quantised(x_TK, torch.ones(()))


def exact_rows(x_ND: torch.Tensor, *_: Any) -> Quantised:
    """The same for rows of experts."""
    return Quantised(x_ND, torch.ones(len(x_ND), 1))


def _train_with_exact_activations(run: RunSpec) -> Result:
    with (
        patch.object(stored, "quantise", exact_activations),
        patch.object(experts_stored, "quantise_rows", exact_rows),
    ):
        return train_steps(run, build_mesh(run.parallel, this_world()), 3)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_the_merged_weights_of_stored_bytes_by_definition(ranks: RankPool, kind: str) -> None:
    """The oracle rounds the base by the definition of E4M3 and trains merged weights in float64.

    Without the rounding of activations and of their gradients all of training is equal. With it, forward
    rounds x to three bits of mantissa (an error of up to 2^-4, 3% in the mean square) and dgrad rounds dy to
    two (6%). A gradient passes through up to twelve matmuls in a row, so its error stays below
    sqrt(12) x (3% + 6%), where weights are small enough that no softmax amplifies it.
    """
    run = tiny_run(MODEL.with_(init_std=0.1), adapter=LORA.with_(kind=kind))
    expected = reference(run)
    exact = ranks.run(_train_with_exact_activations, 1, run)
    bytes_ = exact[0].weights["blocks.1.mlp.up.weight"]
    drawn = {name: one.detach() for name, one in reference_model(run.with_(adapter=None)).named_parameters()}
    group = [drawn[f"blocks.1.mlp.{own}.weight"] for own in ("gate", "up")]
    assert torch.equal(bytes_, to_bytes(group[1], scale_of(group)))
    trained = {name: one for name, one in expected.weights.items() if ".adapter." in name}
    assert_same_training(only_adapters(exact), dataclasses.replace(expected, weights=trained))
    rounded = run_case(ranks, run)
    assert abs(rounded[0].losses[0] / expected.losses[0] - 1) < 0.01
    ours, theirs = (
        torch.cat([each[name].flatten() for name in sorted(expected.gradients[0])])
        for each in (rounded[0].gradients[0], expected.gradients[0])
    )
    assert 1e-3 < (ours - theirs).norm() / theirs.norm() < 0.31


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_the_merged_weights_of_stored_experts_by_definition(ranks: RankPool, kind: str) -> None:
    """As above: without the rounding of activations training is that of experts that the oracle rounds."""
    run = routed(tiny_run(MODEL.with_(init_std=0.1), adapter=LORA.with_(kind=kind)))
    expected = reference(run)
    exact = ranks.run(_train_with_exact_activations, 1, run)
    drawn = dict(reference_model(run.with_(adapter=None)).named_parameters())
    name = "blocks.1.mlp.experts.up"
    for bytes_, matrix in zip(exact[0].weights[name], drawn[name].detach(), strict=True):
        assert torch.equal(bytes_, to_bytes(matrix, scale_of([matrix])))
    trained = {name: one for name, one in expected.weights.items() if ".adapter" in name}
    assert_same_training(only_adapters(exact), dataclasses.replace(expected, weights=trained))


@pytest.mark.soak
def test_compiled_blocks_with_experts(ranks: RankPool, routed_alone) -> None:
    run = routed(base_run(compile=True, memory=MemorySpec(recompute="selective")))
    answers = ranks.run(test_compiled._train_compiled, 1, run, 3)
    assert max(_errors([result for result, _ in answers], routed_alone["lora"]).values()) < RTOL


def test_compiled_blocks(ranks: RankPool, alone) -> None:
    run = base_run(compile=True, memory=MemorySpec(recompute="selective"), model=MODEL)
    answers = ranks.run(test_compiled._train_compiled, 1, run, 3)
    assert max(_errors([result for result, _ in answers], alone["lora"]).values()) < RTOL
