"""A frozen base in fp8 on any mesh: in float64 with emulated matmuls every rank rounds alike."""

import dataclasses
from typing import Any

import pytest
import torch
from tests.equivalence import test_compiled
from tests.equivalence.test_fp8 import MODEL, _errors, fp8_run
from tests.support.equivalence import Result, run_case

from meshwright.rehearse.rank_pool import RankPool
from meshwright.spec import AdapterSpec, Fp8Spec, MemorySpec, ParallelSpec, PrecisionSpec, RunSpec

RTOL = 1e-9
LORA = AdapterSpec(rank=3, alpha=8, base="fp8")
DORA = LORA.with_(kind="dora")


def base_run(adapter: AdapterSpec = LORA, **changes: Any) -> RunSpec:
    return fp8_run(**{"precision": PrecisionSpec(compute="fp64"), "adapter": adapter, **changes})


def only_adapters(results: list[Result]) -> list[Result]:
    """The results without the base, which is stored in bytes in one run and in full in the other."""
    return [
        dataclasses.replace(
            one, weights={name: tensor for name, tensor in one.weights.items() if ".adapter." in name}
        )
        for one in results
    ]


@pytest.fixture(scope="module")
def alone(ranks: RankPool) -> dict[str, list[Result]]:
    """One process, by kind of adapter."""
    return {"lora": run_case(ranks, base_run()), "dora": run_case(ranks, base_run(DORA))}


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


def test_compiled_blocks(ranks: RankPool, alone) -> None:
    run = base_run(compile=True, memory=MemorySpec(recompute="selective"), model=MODEL)
    answers = ranks.run(test_compiled._train_compiled, 1, run, 3)
    assert max(_errors([result for result, _ in answers], alone["lora"]).values()) < RTOL
