"""Unmodified decoders of transformers, of families without model code here: every axis equals one device."""

import pytest
from tests.support.module_training import (
    fit_spec,
    join_stages,
    parallel,
    recompute,
    relative_errors,
    train_cases,
    train_plain_loop,
)
from tests.support.soak import soak
from tests.support.user_modules import DECODERS, MORE_DECODERS, SLOW_IMPORTS

from meshwright.spec.modules import FitSpec

RANKS_IMPORT = SLOW_IMPORTS
RTOL = 1e-9


def assert_equal(ranks, name: str, num_ranks: int, cases: dict[tuple[str, str], dict]) -> None:
    """Every case, (optimizer, name) -> changes of the spec, equals the plain loop on all ranks."""
    specs = [fit_spec(optim, microbatch_samples=2, **changes) for (optim, _), changes in cases.items()]
    expected = {optim: train_plain_loop(name, optim) for optim, _ in cases}
    for by_rank in ranks.run(train_cases, num_ranks, name, specs):
        for (optim, case), trained in zip(cases, by_rank, strict=True):
            errors = relative_errors(trained, expected[optim])
            wrong = {what: error for what, error in errors.items() if not error <= RTOL}
            assert not wrong, (case, optim, sorted(wrong.items(), key=lambda item: -item[1])[:8])


TP = {
    ("sgd", "tp2"): {"parallel": parallel(tp=2)},
    ("adamw", "tp2 recompute"): {"parallel": parallel(tp=2), "memory": recompute("full")},
}
TP_WITH_ZERO = {
    ("adamw", "zero_1 tp2"): {"parallel": parallel(tp=2, dp_shard=2, zero=1)},
    ("sgd", "zero_3 tp2"): {"parallel": parallel(tp=2, dp_shard=2, zero=3)},
}


@pytest.mark.parametrize("name", [soak(name) if name == "olmo2" else name for name in DECODERS])
def test_tp_by_the_published_plan(ranks, name):
    assert_equal(ranks, name, 2, TP)


@pytest.mark.parametrize("name", ["gemma3", soak("olmo2"), soak("starcoder2")])
def test_tp_with_zero(ranks, name):
    assert_equal(ranks, name, 4, TP_WITH_ZERO)


CP = {
    ("sgd", "cp2"): {"parallel": parallel(cp=2)},
    ("adamw", "cp2 ring recompute"): {
        "parallel": parallel(cp=2, cp_kind="ring"),
        "memory": recompute("full"),
    },
    ("sgd", "cp2 ulysses zero_3"): {"parallel": parallel(cp=2, cp_kind="ulysses", zero=3)},
}
CP_WITH_OTHERS = {
    ("sgd", "zero_3 cp2"): {"parallel": parallel(cp=2, dp_shard=2, zero=3, cp_kind="ring")},
    ("sgd", "cp2 tp2"): {"parallel": parallel(cp=2, tp=2)},
}


@pytest.mark.parametrize("name", [soak("olmo2"), "gemma3"])
def test_cp_through_the_attention_interface(ranks, name):
    assert_equal(ranks, name, 2, CP)


def test_cp_with_zero_and_tp(ranks):
    assert_equal(ranks, "gemma3", 4, CP_WITH_OTHERS)


PP = {
    "1f1b": parallel(pp=2),
    "interleaved": parallel(pp=2, virtual_stages=2, schedule="interleaved_1f1b"),
    "zero bubble": parallel(pp=2, virtual_stages=2, schedule="zbv"),
}


@pytest.mark.parametrize("name", [soak("olmo2"), "gemma3_untied"])
def test_pp_by_the_published_parts(ranks, name):
    specs = {case: fit_spec("adamw", microbatch_samples=2, parallel=axes) for case, axes in PP.items()}
    specs["recompute"] = specs["1f1b"].with_(memory=recompute("full"))
    assert_stages_equal(ranks, name, 2, specs)


def test_pp_with_tp_and_zero(ranks):
    specs = {
        "tp2": fit_spec("adamw", microbatch_samples=2, parallel=parallel(pp=2, tp=2)),
        "zero_3": fit_spec("adamw", microbatch_samples=2, parallel=parallel(pp=2, dp_shard=2, zero=3)),
    }
    assert_stages_equal(ranks, "gemma3_untied", 4, specs)


def assert_stages_equal(ranks, name: str, num_ranks: int, specs: dict[str, FitSpec]) -> None:
    expected = train_plain_loop(name, "adamw")
    by_rank = ranks.run(train_cases, num_ranks, name, list(specs.values()))
    for index, case in enumerate(specs):
        errors = relative_errors(join_stages([results[index] for results in by_rank]), expected)
        assert max(errors.values()) <= RTOL, (case, max(errors, key=errors.get), max(errors.values()))


@pytest.mark.soak
@pytest.mark.parametrize("name", MORE_DECODERS)
def test_tp_of_more_families(ranks, name):
    assert_equal(ranks, name, 2, TP)
    assert_equal(ranks, name, 4, TP_WITH_ZERO)
