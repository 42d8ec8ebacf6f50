"""Plans on workstation, inference and export devices: they fit, and their speed is possible."""

import pytest

from meshwright.errors import PlanError
from meshwright.hardware import parse_cluster
from meshwright.plan.make_plan import make_plan
from meshwright.plan.search.pins import parse_pins
from meshwright.plan.search.request import Request, fill_request


@pytest.mark.parametrize(
    ("model", "on"),
    [
        ("qwen3-0.6b", "rtx3090:1"),
        ("llama-3.1-8b", "rtx5090:8"),
        ("llama-3.1-8b", "rtxpro6000:4"),
        ("llama-3.1-8b", "a6000:8"),
        ("qwen3-0.6b", "a10:4"),
        ("llama-3.1-8b", "l4:8"),
        ("qwen3-0.6b", "t4:4"),
        ("llama-3.1-8b", "h20:8"),
        ("llama-3.1-8b", "gh200:32"),
        ("llama-3.1-8b", "alps:8"),
    ],
)
def test_a_plan_fits_and_its_mfu_is_possible(model: str, on: str) -> None:
    cluster = parse_cluster(on)
    question = fill_request(
        Request(model, cluster, parse_pins([]), sequence_length=2048, batch_tokens=2**20)
    ).question
    best = make_plan(question, top=1).best
    assert best.device_bytes < cluster.device.memory_bytes
    assert 0.15 < best.mfu < 0.75
    assert best.num_ranks == cluster.num_devices


def test_turing_computes_in_fp16_and_says_why() -> None:
    request = Request("qwen3-0.6b", parse_cluster("t4:4"), parse_pins([]), sequence_length=2048)
    filled = fill_request(request)
    assert filled.question.run.precision.compute == "fp16"
    assert filled.question.run.precision.loss_scale is not None
    assert any("T4 16GB has no bf16" in text for text in filled.assumed)


def test_8b_on_one_24_gb_card_is_refused_with_what_would_fit() -> None:
    question = fill_request(Request("llama-3.1-8b", parse_cluster("rtx3090:1"), parse_pins([]))).question
    with pytest.raises(PlanError, match="does not fit on 1 x NVIDIA RTX 3090"):
        make_plan(question, top=1)
