"""Every kind of run names how far its memory may be off; what is held against traces says the least."""

from dataclasses import replace

import pytest
from tests.support.plans import asked

from meshwright.hardware.catalogue import parse_cluster
from meshwright.plan.memory.margins import (
    COMPILED,
    DENSE,
    FORMULA,
    INTERLEAVED,
    LOW_PRECISION,
    ROUTED,
    ROUTED_GATHERED,
    SPLIT,
    Margin,
    memory_margin,
)
from meshwright.plan.predict import Prediction, predict_run
from meshwright.plan.workload.formats import runtime_of, workload_of
from meshwright.plan.workload.layouts import layouts
from meshwright.plan.workload.schedules import SCHEDULES
from meshwright.published.frameworks import find_framework
from meshwright.spec.run import RunSpec

TWO_STAGES = {"pp": 2, "virtual_stages": 2, "num_microbatches": 8}


def run_of(model: str, *pins: str) -> RunSpec:
    return asked(model, "h200:1", *pins, seq=4096, batch_tokens=2**15).question.run


def margin_of(model: str, *pins: str, schedule: str = "1f1b", **axes: int) -> Margin | None:
    run = run_of(model, *pins)
    at = layouts(schedule=SCHEDULES.index(schedule), **axes)
    return memory_margin(workload_of(run), at, runtime_of(run))


@pytest.mark.parametrize(
    ("margin", "model", "pins", "axes"),
    [
        (DENSE, "llama-3.2-1b", ("compile=false",), {"dp_shard": 8, "zero": 3}),
        (DENSE, "llama-3.2-1b", ("compile=false", "data.documents=separate"), {"tp": 2}),
        (DENSE, "llama-3.2-1b", ("compile=false",), {"schedule": "interleaved_1f1b", **TWO_STAGES}),
        (COMPILED, "llama-3.2-1b", ("compile=true",), {}),
        (
            INTERLEAVED,
            "llama-3.2-1b",
            ("compile=false",),
            {"schedule": "interleaved_1f1b", "zero": 2, **TWO_STAGES},
        ),
        (SPLIT, "llama-3.2-1b", ("compile=false",), {"schedule": "zbv", **TWO_STAGES}),
        (LOW_PRECISION, "llama-3.2-1b", ("compile=false", "precision.fp8=current"), {}),
        (FORMULA, "llama-3.2-1b", ("compile=false", "precision.compute=fp32"), {}),
        (ROUTED, "mixtral-8x7b", ("compile=false",), {"dp_shard": 8, "zero": 1, "ep": 8}),
        (ROUTED_GATHERED, "mixtral-8x7b", ("compile=false",), {"dp_shard": 8, "zero": 3, "ep": 8}),
    ],
)
def test_the_kind_decides(margin: Margin, model: str, pins: tuple[str, ...], axes: dict[str, object]) -> None:
    assert margin_of(model, *pins, **axes) == margin  # pyright: ignore[reportArgumentType]


def test_of_others_nothing_is_said() -> None:
    work = workload_of(run_of("llama-3.2-1b"))
    assert memory_margin(work, layouts(tp=2), find_framework("megatron")) is None


def test_bytes_stand_beside_the_share() -> None:
    assert Margin(0.05, "x", num_bytes=100.0).of(1000.0) == pytest.approx(150.0)
    assert "and 358.4 MiB" in Margin(0.05, "x", num_bytes=0.35 * 2**30).words


def test_a_prediction_says_when_its_margin_decides() -> None:
    found: Prediction = predict_run(run_of("llama-3.2-1b", "compile=false"), parse_cluster("h200:1"))
    assert found.memory_margin == DENSE
    assert not found.is_uncertain
    near = replace(found, capacity_bytes=int(found.peak_stage.device_bytes / 0.98))
    assert near.is_uncertain
