"""Each advisor with a run it leaves alone and a run it speaks about."""

import pytest
from tests.support.run_files import VALID

from meshwright.spec.advice import ADVISORS, advise
from meshwright.spec.text import load_run, parse_run, recipe_names

GPU = ["device=cuda", "precision.compute=bf16"]
EP2 = ["parallel.ep=2", "parallel.dp_shard=2", "parallel.zero=1"]
FP8_EXPERTS = [*GPU, "compile=true", "precision.fp8.experts=true", "model.moe.width=128"]
# advisor -> (base run, overrides it leaves alone, overrides it speaks about, words of the hint)
CASES = {
    "family_keeps_its_proportions": (
        "dense",
        [],
        ["model=llama-3.1-8b", "model.width=512"],
        "model.attention.num_heads=4 model.attention.num_kv_heads=4 model.mlp.width=1792",
    ),
    "tensor_cores_are_used": ("dense", GPU, ["device=cuda"], "precision.compute=tf32"),
    "vocabulary_fills_tiles": (
        "dense",
        [*GPU, "parallel.tp=4"],
        [*GPU, "parallel.tp=4", "model.vocab_size=528"],
        "model.vocab_size=768",
    ),
    "widths_fill_tiles": ("moe", [*GPU, "model.moe.width=128"], GPU, "model.moe.width=128"),
    "microbatch_fills_device": (
        "dense",
        GPU,
        [*GPU, "data.sequence_length=64"],
        "raise data.microbatch_sequences",
    ),
    "pipeline_is_filled": ("dense", ["parallel.pp=4"], ["parallel.pp=8"], "more or smaller micro-batches"),
    "fastest_kernels_are_allowed": ("dense", GPU, [*GPU, "deterministic=true"], "bitwise equal"),
    "blocks_are_compiled": (
        "moe",
        [*EP2, "compile=true", "memory.recompute=full"],
        [*EP2, "compile=true", "memory.recompute=selective"],
        "recompute=full compiles their parts",
    ),
    "fp8_is_fast": (
        "dense",
        [*GPU, "precision.fp8=current", "compile=true"],
        [*GPU, "precision.fp8=current"],
        "compile=true",
    ),
    "fp8_experts_have_many_rows": (
        "moe",
        [*FP8_EXPERTS, "data.microbatch_sequences=64", "data.batch_sequences=64"],
        FP8_EXPERTS,
        "leave experts out",
    ),
    "fp8_weights_are_cast_once": (
        "dense",
        [*GPU, "precision.fp8.cast_weights=per_step"],
        [*GPU, "precision.fp8=current"],
        "per_step casts them once",
    ),
}
BY_NAME = {advisor.__name__: advisor for advisor in ADVISORS}


def test_every_advisor_has_a_case():
    assert list(CASES) == list(BY_NAME)


def test_fewer_microbatches_than_pipeline_ranks_are_one_note() -> None:
    few = ["parallel.pp=8", "parallel.schedule=gpipe", "data.batch_sequences=4"]
    run = parse_run(VALID["dense"], few).require_valid()
    (note,) = [one for one in advise(run) if one.where == "parallel.pp"]
    assert "175% of the work" in note.fact and "fewer than pipeline ranks" in note.fact
    assert note.hint.startswith("raise data.batch_sequences to 8 or more")
    assert note.cost == pytest.approx(7 / 11)


def test_a_ring_inside_selective_recompute_is_not_compiled() -> None:
    ring = ["parallel.cp=2", "parallel.cp_kind=ring", "compile=true", "memory.recompute=selective"]
    (note,) = BY_NAME["blocks_are_compiled"](parse_run(VALID["dense"], ring).require_valid())
    assert "cp_kind=ring passes keys on" in note.fact and "cp_kind=gather and ulysses" in note.hint


def test_without_a_bubble_too_few_microbatches_are_named_too() -> None:
    zero_bubble = ["parallel.schedule=zbv", "parallel.virtual_stages=2", "parallel.pp=4"]
    run = parse_run(VALID["dense"], [*zero_bubble, "data.batch_sequences=2"]).run
    (note,) = [one for one in advise(run) if one.where == "parallel.pp"]
    assert note.fact.startswith("pp=4 with 2 micro-batches, fewer than") and note.cost is None


@pytest.mark.parametrize("name", CASES)
def test_it_speaks_exactly_when_it_should(name: str):
    base, good, wasteful, words = CASES[name]
    assert list(BY_NAME[name](parse_run(VALID[base], good).require_valid())) == []
    (advice,) = BY_NAME[name](parse_run(VALID[base], wasteful).require_valid())
    assert words in advice.hint
    assert advice.fact and advice.where


def test_the_share_of_a_rank_counts():
    (advice,) = advise(parse_run(VALID["dense"], [*GPU, "parallel.tp=4"]).require_valid())
    assert (advice.where, advice.hint) == ("model.mlp.width", "model.mlp.width=256 fills the tiles")


def test_weights_to_start_from_keep_their_shapes():
    run = parse_run(VALID["dense"], [*GPU, "parallel.tp=4", "checkpoint.start_from=runs/first"])
    assert advise(run.require_valid()) == []


@pytest.mark.parametrize("name", recipe_names())
def test_recipes_waste_nothing(name: str):
    assert advise(load_run(name)) == []
