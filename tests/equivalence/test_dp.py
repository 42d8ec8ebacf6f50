"""Data parallel in all its stages equals one device, however the batch is split and whatever it contains."""

import pytest
from tests.support.equivalence import prove, prove_with_optimizers
from tests.support.oracle import reference
from tests.support.runs import MODELS, OPTIMIZERS, tiny_run
from tests.support.soak import soak

from meshwright.spec import ParallelSpec

STAGES = {
    "replicate_2": ParallelSpec(dp_replicate=2),
    "replicate_4": ParallelSpec(dp_replicate=4),
    **{f"zero_{stage}": ParallelSpec(dp_shard=4, zero=stage) for stage in (1, 2, 3)},
    **{f"hybrid_zero_{stage}": ParallelSpec(dp_replicate=2, dp_shard=2, zero=stage) for stage in (1, 2, 3)},
}
ONE_OF_EACH = {
    "zero_0": ParallelSpec(dp_replicate=2),
    **{f"zero_{stage}": ParallelSpec(dp_shard=2, zero=stage) for stage in (1, 2, 3)},
}


# Two replicas and two shards are axes of test_layouts.py.
@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_equals_one_device(ranks, stage):
    prove_with_optimizers(ranks, tiny_run("tied", parallel=STAGES[stage]))


@pytest.mark.parametrize(
    ("dp", "microbatch_sequences"), [(1, 1), (1, 8), (2, 2), soak(1, 2), soak(2, 4), (4, 2)]
)
def test_any_split_of_the_batch_gives_the_same(ranks, dp, microbatch_sequences):
    parallel = ParallelSpec(dp_replicate=dp)
    prove(ranks, tiny_run("gqa", parallel=parallel, microbatch_sequences=microbatch_sequences))


@pytest.mark.parametrize("stage", (1, 2, 3))
@pytest.mark.parametrize("microbatch_sequences", (2, soak(4)))
def test_any_split_under_sharding_gives_the_same(ranks, stage, microbatch_sequences):
    parallel = ParallelSpec(dp_shard=2, zero=stage)
    prove(ranks, tiny_run("moe", parallel=parallel, microbatch_sequences=microbatch_sequences))


@pytest.mark.parametrize("stage", [name if "hybrid" not in name else soak(name) for name in STAGES])
def test_a_rank_without_targets_takes_part(ranks, stage):
    """19 sequences in an epoch: of four ranks the last has nothing but padding in the third batch."""
    run = tiny_run("gqa", parallel=STAGES[stage], num_sequences=19 + 3, max_epochs=1)
    results = prove(ranks, run)
    assert [len(ids) for ids in results[0].sample_ids] == [8, 8, 3]


@pytest.mark.parametrize("stage", ONE_OF_EACH)
def test_the_last_batch_is_divided_by_its_own_tokens(ranks, stage):
    """One sequence is left for the last batch: the second micro-batches and the second rank are empty."""
    run = tiny_run("moe", parallel=ONE_OF_EACH[stage], num_sequences=17 + 3, max_epochs=1, optim="sgd")
    results = prove(ranks, run)
    assert len(results[0].sample_ids[-1]) == 1


@pytest.mark.parametrize("stage", ONE_OF_EACH)
@pytest.mark.parametrize("frozen", (("embedding",), soak(("attention", "head")), ("norm", "blocks.0")))
def test_frozen_parameters_stay(ranks, stage, frozen):
    run = tiny_run("gqa", parallel=ONE_OF_EACH[stage], optim="adamw", microbatch_sequences=2)
    results = prove(ranks, run, frozen=frozen)
    start = reference(run, num_steps=0).weights
    for name, weight in results[0].weights.items():
        is_frozen = any(part in name for part in frozen)
        assert bool((weight == start[name]).all()) == is_frozen, name


@pytest.mark.parametrize("stage", (1, 2, 3))
@pytest.mark.parametrize("vocab_size", (67, soak(257)))
def test_rows_that_do_not_divide(ranks, stage, vocab_size):
    """67 = 17 + 17 + 17 + 16; norms of 15 over 4; experts and heads of 3 leave a rank with nothing."""
    model = MODELS["moe"].with_(
        vocab_size=vocab_size, width=15, moe={**MODELS["moe"].moe.model_dump(), "num_experts": 3}
    )
    prove(ranks, tiny_run(model, parallel=ParallelSpec(dp_shard=4, zero=stage), optim="adamw"))


@pytest.mark.parametrize("stage", ONE_OF_EACH)
def test_clipping_comes_after_normalising(ranks, stage):
    """The limit lies between the norm of the mean and that of the sum: nothing is clipped."""
    natural = reference(tiny_run("gqa", optim=OPTIMIZERS["sgd"].with_(max_grad_norm=None)))
    limit = 2 * max(natural.grad_norms)
    optim = OPTIMIZERS["sgd"].with_(max_grad_norm=limit)
    results = prove(ranks, tiny_run("gqa", parallel=ONE_OF_EACH[stage], optim=optim, microbatch_sequences=2))
    num_targets = 8 * 16 / 2  # at least half of the positions of a batch count
    assert max(results[0].grad_norms) < limit < num_targets * min(results[0].grad_norms)


@pytest.mark.parametrize("stage", ONE_OF_EACH)
def test_averages_of_weights(ranks, stage):
    optim = OPTIMIZERS["adamw"].with_(ema_decay=0.7)
    results = prove(ranks, tiny_run("gqa", parallel=ONE_OF_EACH[stage], optim=optim, microbatch_sequences=2))
    assert set(results[0].ema) == set(results[0].weights)


@pytest.mark.parametrize("decay", ("matrices", "all"))
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_decay_falls_on_the_parameters_named(ranks, decay, kind):
    optim = OPTIMIZERS[kind].with_(weight_decay_on=decay, weight_decay=0.5)
    prove(ranks, tiny_run("gpt", parallel=ParallelSpec(dp_shard=2, zero=1), optim=optim))


@pytest.mark.parametrize("model", MODELS)
def test_one_rank_is_the_oracle(ranks, model):
    prove_with_optimizers(ranks, tiny_run(model, microbatch_sequences=2))


def test_joined_documents(ranks):
    run = tiny_run("gqa", parallel=ParallelSpec(dp_shard=2, zero=1))
    prove(ranks, run.with_(data=run.data.with_(documents="joined")))
