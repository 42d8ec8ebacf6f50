"""Unmodified modules of transformers and torch: every ZeRO stage equals a plain loop on one device."""

from itertools import cycle, product

import pytest
from tests.support.module_training import (
    fit_spec,
    join_stages,
    offload,
    parallel,
    recompute,
    relative_errors,
    train_cases,
    train_plain_loop,
)
from tests.support.runs import MORE_OPTIMIZERS, OPTIMIZERS
from tests.support.user_modules import MODULES, SLOW_IMPORTS

RANKS_IMPORT = SLOW_IMPORTS
RTOL = 1e-9
TWO_RANKS = {
    "dp2": {"parallel": parallel(dp_replicate=2)},
    "zero_1": {"parallel": parallel(dp_shard=2, zero=1)},
    "zero_2 recompute": {"parallel": parallel(dp_shard=2, zero=2), "memory": recompute("full")},
    "zero_1 offload": {"parallel": parallel(dp_shard=2, zero=1), "memory": offload("optimizer,activations")},
    "zero_3": {"parallel": parallel(dp_shard=2, zero=3)},
    "zero_3 offload": {"parallel": parallel(dp_shard=2, zero=3), "memory": offload("activations")},
    "zero_3 recompute": {"parallel": parallel(dp_shard=2, zero=3), "memory": recompute("selective")},
}


def _spec(name: str, optim: str, case: dict):
    # Batch norm has the statistics of the full batch only where a rank computes its part in one micro-batch.
    return fit_spec(
        optim, microbatch_samples=4 if name == "resnet" else 2, sync_batch_norm=name == "resnet", **case
    )


@pytest.mark.parametrize("name", MODULES)
def test_two_ranks_equal_one_device(ranks, name):
    """SGD and AdamW alternate."""
    _prove(ranks, name, [(optim, case) for case, optim in zip(TWO_RANKS, cycle(OPTIMIZERS), strict=False)])


@pytest.mark.soak
@pytest.mark.parametrize("name", MODULES)
def test_two_ranks_equal_one_device_with_every_optimizer(ranks, name):
    _prove(ranks, name, list(product(OPTIMIZERS, TWO_RANKS)))


def _prove(ranks, name: str, chosen: list[tuple[str, str]]) -> None:
    cases = {(optim, case): TWO_RANKS[case] for optim, case in chosen}
    specs = [_spec(name, optim, changes) for (optim, _), changes in cases.items()]
    expected = {optim: train_plain_loop(name, optim) for optim in OPTIMIZERS}
    for by_rank in ranks.run(train_cases, 2, name, specs):
        for (optim, case), trained in zip(cases, by_rank, strict=True):
            errors = relative_errors(trained, expected[optim])
            wrong = {what: error for what, error in errors.items() if not error <= RTOL}
            assert not wrong, (case, optim, sorted(wrong.items(), key=lambda item: -item[1])[:8])


@pytest.mark.parametrize("name", MODULES)
def test_hybrid_on_four_ranks(ranks, name):
    cases = [
        {"parallel": parallel(dp_replicate=2, dp_shard=2, zero=zero), "memory": recompute("full", 2)}
        for zero in (1, 3)
    ]
    specs = [
        _spec(name, "sgd", case).with_(data={"batch_samples": 8, "microbatch_samples": 2}) for case in cases
    ]
    expected = train_plain_loop(name, "sgd")
    for by_rank in ranks.run(train_cases, 4, name, specs):
        for spec, trained in zip(specs, by_rank, strict=True):
            errors = relative_errors(trained, expected)
            assert max(errors.values()) <= RTOL, (spec.parallel, max(errors, key=errors.get))


PIPELINES = {
    "1f1b": parallel(pp=2),
    "gpipe": parallel(pp=2, schedule="gpipe"),
    "interleaved": parallel(pp=2, virtual_stages=2, schedule="interleaved_1f1b"),
    "zero bubble": parallel(pp=2, virtual_stages=2, schedule="zbv"),
}


def test_a_chain_of_parts_in_a_pipeline(ranks):
    """Every stage of three steps, dropout aside, on two ranks; one of them with recompute."""
    specs = {case: fit_spec("adamw", microbatch_samples=2, parallel=axes) for case, axes in PIPELINES.items()}
    specs["recompute"] = specs["1f1b"].with_(memory=recompute("full"))
    expected = train_plain_loop("sequential", "adamw")
    by_rank = ranks.run(train_cases, 2, "sequential", list(specs.values()))
    for index, case in enumerate(specs):
        errors = relative_errors(join_stages([results[index] for results in by_rank]), expected)
        assert max(errors.values()) <= RTOL, (case, max(errors, key=errors.get))


def test_a_pipeline_with_zero(ranks):
    cases = [parallel(pp=2, dp_shard=2, zero=zero) for zero in (1, 3)]
    specs = [fit_spec("sgd", microbatch_samples=2, parallel=axes) for axes in cases]
    expected = train_plain_loop("sequential", "sgd")
    by_rank = ranks.run(train_cases, 4, "sequential", specs)
    for index, spec in enumerate(specs):
        errors = relative_errors(join_stages([results[index] for results in by_rank]), expected)
        assert max(errors.values()) <= RTOL, (spec.parallel, max(errors, key=errors.get))


@pytest.mark.soak
@pytest.mark.parametrize("kind", sorted(MORE_OPTIMIZERS))
def test_optimizers_that_read_full_parameters(ranks, kind):
    """Every stage on two ranks equals one rank, for optimizers whose step depends on the full parameter."""
    optim = MORE_OPTIMIZERS[kind]
    (alone,) = ranks.run(train_cases, 1, "mlp", [fit_spec(optim, microbatch_samples=2)])[0]
    layouts = [parallel(dp_replicate=2), *(parallel(dp_shard=2, zero=zero) for zero in (1, 2, 3))]
    specs = [fit_spec(optim, microbatch_samples=2, parallel=axes) for axes in layouts]
    for by_rank in ranks.run(train_cases, 2, "mlp", specs):
        for spec, trained in zip(specs, by_rank, strict=True):
            errors = relative_errors(trained, alone)
            assert max(errors.values()) <= RTOL, (spec.parallel, max(errors, key=errors.get))
