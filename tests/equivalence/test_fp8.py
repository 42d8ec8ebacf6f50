"""fp8 linears do not depend on the layout: in float64 with emulated matmuls every rank rounds alike.

The sums around the fp8 numbers are reordered (partial sums over tp, gradients over ranks), which costs
digits of float64; a number that would then round to another fp8 number would show as an error of percents.
"""

import dataclasses

import pytest
import torch
from tests.support.equivalence import Result, run_case, train_steps, worst_errors
from tests.support.runs import SEQUENCE_LENGTH, VOCAB_SIZE, ragged_dataset
from tests.support.soak import soak

from meshwright.mesh import World, build_mesh
from meshwright.rehearse.differences import merged
from meshwright.rehearse.rank_pool import RankPool
from meshwright.spec import (
    AttentionSpec,
    DataSpec,
    Fp8Spec,
    MemorySpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    OptimSpec,
    ParallelSpec,
    PrecisionSpec,
    RopeSpec,
    RunSpec,
    ScheduleSpec,
)

NUM_STEPS = 3
RTOL = 1e-9
MODEL = ModelSpec(
    vocab_size=VOCAB_SIZE,
    num_layers=3,
    width=32,
    max_positions=SEQUENCE_LENGTH,
    attention=AttentionSpec(num_heads=8, num_kv_heads=4, head_width=8),
    mlp=MlpSpec(width=64),
    rope=RopeSpec(),
    init_std=0.3,
)


def fp8_run(recipe: str = "current", **changes: object) -> RunSpec:
    """Two sequences in a micro-batch, so that half of one of them still fills the kernel's 16 tokens."""
    run = RunSpec(
        model=MODEL,
        precision=PrecisionSpec(compute="fp64", fp8=Fp8Spec(recipe=recipe, bf16_layers_each_end=0)),
        optim=OptimSpec(),
        schedule=ScheduleSpec(num_steps=NUM_STEPS, kind="constant"),
        data=DataSpec(
            path=ragged_dataset(32),
            sequence_length=SEQUENCE_LENGTH,
            batch_sequences=8,
            microbatch_sequences=2,
            holdout_sequences=4,
        ),
        device="cpu",
    )
    return run.with_(**changes)


def _errors(results: list[Result], expected: list[Result]) -> dict[str, float]:
    errors = {
        f"loss {step}": abs(ours / exact - 1)
        for step, (ours, exact) in enumerate(zip(results[0].losses, expected[0].losses, strict=True))
    }
    for step in range(NUM_STEPS):
        parts = [
            merged(each, lambda result, step=step: result.gradients[step]) for each in (results, expected)
        ]
        errors |= {f"gradient {step} {name}": error for name, error in worst_errors(*parts).items()}
    parts = [merged(each, lambda result: result.weights) for each in (results, expected)]
    return errors | {f"weight {name}": error for name, error in worst_errors(*parts).items()}


LAYOUTS = {
    "tp2": {"tp": 2},
    "zero3": {"dp_shard": 2, "zero": 3},
    "zero1": {"dp_shard": 2, "zero": 1},
    "pp2": {"pp": 2},
    "cp2": {"cp": 2},
    "zero3-tp2": {"dp_shard": 2, "zero": 3, "tp": 2},
    "cp2-tp2": {"cp": 2, "tp": 2},
    "pp2-zero-bubble": {"pp": 2, "schedule": "interleaved_zero_bubble"},
}
ALWAYS = {
    *((layout, "current") for layout in ("tp2", "pp2", "cp2", "zero3-tp2")),
    *((layout, "delayed") for layout in ("tp2", "zero3")),
}
CASES = [
    pytest.param(layout, recipe, marks=() if (layout, recipe) in ALWAYS else pytest.mark.soak)
    for layout in LAYOUTS
    for recipe in ("current", "delayed")
]


@pytest.fixture(scope="module")
def alone(ranks: RankPool) -> dict[str, list[Result]]:
    """One process, by recipe."""
    return {recipe: run_case(ranks, fp8_run(recipe)) for recipe in ("current", "delayed")}


@pytest.mark.parametrize(("layout", "recipe"), CASES)
def test_fp8_equals_one_process(ranks: RankPool, alone, layout: str, recipe: str) -> None:
    run = fp8_run(recipe, parallel=ParallelSpec(**LAYOUTS[layout]))
    errors = _errors(run_case(ranks, run), alone[recipe])
    wrong = {name: error for name, error in errors.items() if not error <= RTOL}
    assert not wrong, wrong


@pytest.mark.parametrize("layout", ["tp2", "zero1", pytest.param("pp2", marks=pytest.mark.soak)])
def test_cached_weights_equal_one_process_that_casts_every_time(ranks: RankPool, alone, layout: str) -> None:
    """They follow every update: a stale copy would show from the second step on."""
    precision = PrecisionSpec(compute="fp64", fp8=Fp8Spec(bf16_layers_each_end=0, cast_weights="per_step"))
    run = fp8_run(precision=precision, parallel=ParallelSpec(**LAYOUTS[layout]))
    errors = _errors(run_case(ranks, run), alone["current"])
    wrong = {name: error for name, error in errors.items() if not error <= RTOL}
    assert not wrong, wrong


EXPERTS = {
    "zero1-ep2": ParallelSpec(dp_shard=2, zero=1, ep=2),
    "tp2-etp2": ParallelSpec(tp=2, etp=2),
    "zero3-ep2-tp2": ParallelSpec(dp_shard=2, zero=3, ep=2, tp=2),
    "cp2-ep2": ParallelSpec(cp=2, ep=2),
    "pp2": ParallelSpec(pp=2),
}
EXPERT_CASES = [
    ("zero1-ep2", "current", "per_step"),
    ("tp2-etp2", "current", "per_microbatch"),
    *(
        pytest.param(layout, "current", "per_microbatch", marks=pytest.mark.soak)
        for layout in ("zero3-ep2-tp2", "cp2-ep2", "pp2")
    ),
    pytest.param("tp2-etp2", "current", "per_step", marks=pytest.mark.soak),
    pytest.param("zero1-ep2", "blockwise", "per_step", marks=pytest.mark.soak),
    pytest.param("tp2-etp2", "blockwise", "per_microbatch", marks=pytest.mark.soak),
]


def expert_run(recipe: str, cast_weights: str = "per_microbatch", **changes: object) -> RunSpec:
    """Experts, linears and micro-batches whose shards still fill the recipe's block."""
    model = MODEL.with_(num_layers=2, moe=MoeSpec(num_experts=4, top_k=2, width=32, aux_loss=0.05))
    sequences = 2
    if recipe == "blockwise":
        attention, moe = MODEL.attention.with_(num_kv_heads=8, head_width=32), model.moe.with_(width=256)
        model, sequences = model.with_(width=128, attention=attention, moe=moe), 128 // SEQUENCE_LENGTH
    fp8 = Fp8Spec(recipe=recipe, bf16_layers_each_end=0, cast_weights=cast_weights, experts=True)
    data = fp8_run().data.with_(microbatch_sequences=sequences, batch_sequences=4 * sequences)
    return fp8_run(model=model, precision=PrecisionSpec(compute="fp64", fp8=fp8), data=data, **changes)


@pytest.mark.parametrize(("layout", "recipe", "cast_weights"), EXPERT_CASES)
def test_experts_equal_one_process(ranks: RankPool, layout: str, recipe: str, cast_weights: str) -> None:
    """ep gives a rank the rows of other micro-batches, and etp a part of each row."""
    expected = run_case(ranks, expert_run(recipe))
    run = expert_run(recipe, cast_weights, parallel=EXPERTS[layout])
    errors = _errors(run_case(ranks, run), expected)
    wrong = {name: error for name, error in errors.items() if not error <= RTOL}
    assert not wrong, wrong


def test_experts_are_really_in_fp8(ranks: RankPool) -> None:
    run = expert_run("current")
    plain = run.with_(precision=run.precision.with_(fp8=run.precision.fp8.with_(experts=False)))
    found, expected = (run_case(ranks, each) for each in (run, plain))
    errors = _errors(found, expected)
    assert min(errors[f"gradient 0 blocks.{layer}.mlp.experts.gate"] for layer in range(2)) > 1e-3


def test_fp8_is_really_at_work(ranks: RankPool, alone) -> None:
    plain = run_case(ranks, fp8_run(precision=PrecisionSpec(compute="fp64")))
    errors = _errors(alone["current"], plain)
    assert min(errors[f"gradient 0 blocks.{layer}.mlp.down.weight"] for layer in range(3)) > 1e-3
    first_step = [alone[recipe][0].losses[0] for recipe in ("current", "delayed")]
    assert first_step[0] == first_step[1]  # without a history yet
    assert alone["current"][0].losses[1:] != alone["delayed"][0].losses[1:]


def _train_variants(variants: list[RunSpec]) -> list[Result]:
    mesh = build_mesh(ParallelSpec(), World(rank=0, local_rank=0, num_ranks=1, device=torch.device("cpu")))
    return [train_steps(run, mesh, NUM_STEPS) for run in variants]


RECOMPUTED = {
    "current": fp8_run("current"),
    "delayed": fp8_run("delayed"),
    "experts": expert_run("current"),
}


@pytest.mark.parametrize(
    ("compute", "kind"),
    [
        *(("fp64", "current"), ("bf16", "delayed"), ("bf16", "experts")),
        *(soak("bf16", "current"), soak("fp64", "delayed"), soak("fp64", "experts")),
    ],
)
def test_recompute_is_bitwise_the_same(ranks: RankPool, kind: str, compute: str) -> None:
    run = RECOMPUTED[kind]
    run = run.with_(precision=run.precision.with_(compute=compute))
    runs = [run.with_(memory=MemorySpec(recompute=recompute)) for recompute in ("none", "selective", "full")]
    kept, *others = ranks.run(_train_variants, 1, runs)[0]
    for other in others:
        assert other.losses == kept.losses
        assert dataclasses.asdict(other)["digests"] == kept.digests
