"""Formats of weights, gradients, moments and linears are priced as the runtime keeps them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.plans import asked
from tests.support.soak import examples

from meshwright.hardware.catalogue import parse_cluster
from meshwright.plan.explain.reasons import STATE_ITEMS
from meshwright.plan.make_plan import make_plan
from meshwright.plan.memory.rank_bytes import memory
from meshwright.plan.predict import Prediction, predict_run
from meshwright.plan.workload.formats import runtime_of, workload_of
from meshwright.plan.workload.layouts import layouts
from meshwright.spec.run import RunSpec

H200 = parse_cluster("h200:1")
BF16 = ("precision.weights=bf16_exact", "precision.gradients=bf16", "optim.state=bf16")


def predicted(model: str, *pins: str) -> Prediction:
    return predict_run(run_of(model, *pins), H200)


def run_of(model: str, *pins: str) -> RunSpec:
    return asked(model, "h200:1", *pins, seq=4096, batch_tokens=2**15).question.run


def state_bytes_per_parameter(*pins: str) -> float:
    run = run_of("llama-3.2-1b", *pins)
    items = predict_run(run, H200).peak_stage.items
    return sum(items.get(name, 0.0) for name in STATE_ITEMS) / workload_of(run).counts.total


@pytest.mark.parametrize(
    ("pins", "expected"),
    [
        ((), 16),
        (BF16[:1], 16),
        (BF16[:2], 14),
        (BF16, 10),
        (("precision.weights=bf16_stochastic", *BF16[1:]), 8),
        (("precision.weights=bf16_stochastic", BF16[1], "optim.kind=adamw_8bit"), 6),
        (("optim.kind=adafactor", "optim.beta1=0"), 8),
    ],
)
def test_bytes_per_parameter(pins: tuple[str, ...], expected: float) -> None:
    assert state_bytes_per_parameter(*pins) == pytest.approx(expected, rel=1e-12)


def test_weights_in_bf16_need_no_cast_copy() -> None:
    assert "cast weights" in predicted("llama-3.2-1b").peak_stage.items
    assert "cast weights" not in predicted("llama-3.2-1b", *BF16[:1]).peak_stage.items


def test_fewer_bytes_are_updated_and_reduced_in_less_time() -> None:
    plain, small = predicted("llama-3.1-8b"), predicted("llama-3.1-8b", *BF16)
    assert small.seconds_by_item["optimizer"] < 0.7 * plain.seconds_by_item["optimizer"]
    assert runtime_of(run_of("llama-3.1-8b", *BF16)).state.reduce == 2


def test_fp8_is_faster_and_keeps_less_where_linears_are_large() -> None:
    bf16, fp8 = (predicted("llama-3.1-8b", *BF16, f"precision.fp8={kind}") for kind in ("null", "current"))
    assert 0.5 < fp8.seconds_by_item["matmul"] / bf16.seconds_by_item["matmul"] < 0.7
    assert fp8.seconds_by_item["elementwise"] > bf16.seconds_by_item["elementwise"]
    assert fp8.peak_stage.items["activations"] < 0.95 * bf16.peak_stage.items["activations"]


def test_two_of_three_matmuls_of_experts_are_faster_in_fp8() -> None:
    """Weight gradients stay in bf16. Kept copies are those of experts too."""
    pins = ("precision.fp8.cast_weights=per_step", "precision.fp8.bf16_layers_each_end=0")
    linears, both = (
        predicted("mixtral-8x7b", *BF16, *pins, f"precision.fp8.experts={value}")
        for value in ("false", "true")
    )
    bf16 = predicted("mixtral-8x7b", *BF16).seconds_by_item["matmul"]
    saved = (linears.seconds_by_item["matmul"] - both.seconds_by_item["matmul"]) / bf16
    assert 0.1 < saved < 1 / 3  # half of two thirds, at most
    assert both.seconds_by_item["elementwise"] > linears.seconds_by_item["elementwise"]
    more = both.peak_stage.items["fp8 weights"] - linears.peak_stage.items["fp8 weights"]
    assert more == pytest.approx(2 * 32 * 3 * 8 * 14336 * 4096, rel=1e-12)


def test_ends_in_bf16_cost_time() -> None:
    def seconds(ends: int) -> float:
        return predicted(
            "llama-3.1-8b", "precision.fp8=current", f"precision.fp8.bf16_layers_each_end={ends}"
        ).step_seconds

    assert seconds(0) < seconds(1) < seconds(8)


def test_weights_cast_once_per_step_take_memory_and_save_time() -> None:
    anew, kept = (
        predicted(
            "llama-3.1-8b",
            *BF16,
            f"precision.fp8.cast_weights={when}",
            "precision.fp8.bf16_layers_each_end=0",
        )
        for when in ("per_microbatch", "per_step")
    )
    linears = 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    assert kept.peak_stage.items["fp8 weights"] == pytest.approx(2 * linears, rel=1e-12)
    assert "fp8 weights" not in anew.peak_stage.items
    assert kept.seconds_by_item["elementwise"] < anew.seconds_by_item["elementwise"]


def test_weights_kept_in_fp8_are_never_planned_with_zero3() -> None:
    question = asked(
        "llama-3.1-8b", "h200:8", "precision.fp8.cast_weights=per_step", seq=4096, batch_tokens=2**18
    ).question
    assert make_plan(question).result.fitting.layouts.zero.max() < 3


def test_routed_experts_stay_in_bf16() -> None:
    bf16, fp8 = (predicted("mixtral-8x7b", f"precision.fp8={kind}") for kind in ("null", "current"))
    # Nearly all matmuls are those of experts, which stay in bf16.
    assert fp8.seconds_by_item["matmul"] > 0.9 * bf16.seconds_by_item["matmul"]


@examples(5)
@given(
    weights=st.sampled_from(["fp32", "bf16_exact", "bf16_stochastic"]),
    gradients=st.sampled_from(["fp32", "bf16"]),
    moments=st.sampled_from(["fp32", "bf16"]),
    shards=st.sampled_from([2, 8, 64]),
)
def test_state_falls_with_the_zero_stage_in_every_format(
    weights: str, gradients: str, moments: str, shards: int
) -> None:
    pins = [f"precision.weights={weights}", f"optim.state={moments}"]
    pins += [f"precision.gradients={gradients}"] if weights != "fp32" else []
    run = run_of("llama-3.2-1b", *pins)
    stages = np.arange(1, 4)
    found = memory(
        workload_of(run), layouts(zero=stages, dp_shard=shards, num_microbatches=2), H200, runtime_of(run)
    ).items
    state = sum(found[name][:, 0] for name in STATE_ITEMS)
    assert (np.diff(state) < 0).all()
