"""Operators against the one count of FLOPs, and layers against the split."""

from typing import Any

import numpy as np
import pytest

from meshwright.plan.framework import Framework, our_runtime
from meshwright.plan.workload import operators
from meshwright.plan.workload.flops import flops_per_token
from meshwright.plan.workload.layouts import layouts
from meshwright.plan.workload.schedules import SCHEDULES
from meshwright.plan.workload.workload import Workload, count_parameters
from meshwright.published.frameworks import find_framework
from meshwright.spec.families import FAMILIES, family
from meshwright.spec.parameters import num_parameters

SEQUENCE = 4096


@pytest.mark.parametrize("name", ["gpt2-124m", "llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v3", "mistral-7b"])
def test_operators_add_up_to_the_flops_of_a_token(name: str) -> None:
    """The matmul shapes that are priced do exactly the work that MFU counts."""
    workload = Workload(family(name), SEQUENCE)
    at = layouts(microbatch_sequences=2)
    counts = workload.counts
    dense = operators.mlp_matmuls(workload, at) if counts.num_dense_layers else []
    routed = operators.moe_matmuls(workload, at) if counts.num_moe_layers else []
    layers, vocabulary = workload.model.num_layers, np.full(1, float(workload.model.vocab_size))
    forward = layers * sum(m.flops[0] for m in operators.attention_matmuls(workload, at))
    forward += counts.num_dense_layers * sum(m.flops[0] for m in dense)
    forward += counts.num_moe_layers * sum(m.flops[0] for m in routed)
    forward += operators.head_matmul(workload, at, vocabulary).flops[0]
    forward += layers * operators.attention_core_flops(workload, at)[0]
    assert 3.0 * forward == pytest.approx(2 * SEQUENCE * flops_per_token(workload.model, SEQUENCE), rel=1e-9)


@pytest.mark.parametrize("name", FAMILIES)
def test_counts_by_placement_are_all_parameters(name: str) -> None:
    model = family(name)
    assert count_parameters(model).total == num_parameters(model)


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_tp_divides_the_work_of_a_layer(tp: int) -> None:
    workload = Workload(family("llama-3.1-8b"), SEQUENCE)
    one, sharded = layouts(), layouts(tp=tp)
    for build in (operators.attention_matmuls, operators.mlp_matmuls):
        full = sum(matmul.flops[0] for matmul in build(workload, one))
        assert sum(matmul.flops[0] for matmul in build(workload, sharded)) == pytest.approx(full / tp)


def test_experts_process_every_routed_token_once_over_ep() -> None:
    workload = Workload(family("qwen3-30b-a3b"), SEQUENCE)
    one, over_ep = layouts(), layouts(dp_shard=8, ep=8)
    routed = operators.expert_tokens(workload, one)[0]
    assert routed == SEQUENCE * 8
    # Each rank sends its tokens away and receives as many.
    assert operators.expert_tokens(workload, over_ep)[0] == routed
    matmul = operators.moe_matmuls(workload, over_ep)[1]
    assert (matmul.groups[0], matmul.m[0]) == (16, SEQUENCE * 8 / 16)


def test_sequence_parallel_divides_the_bytes_of_norms() -> None:
    workload = Workload(family("llama-3.1-8b"), SEQUENCE)
    at = layouts(tp=8)
    tokens = at.microbatch_tokens(SEQUENCE)

    def forward_bytes(framework: Framework) -> float:
        residual = framework.residual_tokens(tokens, at.tp)
        found = operators.elementwise_bytes(workload, at, moe=False, passes=1.0, residual_tokens=residual)
        return found[0][0]

    with_it, without = (find_framework(name) for name in ("megatron", "megatron-deepspeed"))
    assert forward_bytes(without) > 2 * forward_bytes(with_it) == 2 * forward_bytes(our_runtime())


@pytest.mark.parametrize(("pp", "virtual"), [(1, 1), (2, 1), (4, 2), (7, 1), (8, 4), (5, 3)])
@pytest.mark.parametrize("balanced", [False, True])
def test_the_fullest_rank_has_its_share_of_layers(pp: int, virtual: int, balanced: bool) -> None:
    workload = Workload(family("llama-3.1-70b"), SEQUENCE)
    split = operators.stage_layers(workload, layouts(pp=pp, virtual_stages=virtual), balanced=balanced)
    mean = workload.model.num_layers / pp
    assert split.most[0] >= np.floor(mean)
    assert split.most[0] <= mean + virtual
    assert split.first[0] <= split.most[0]
    assert split.last[0] <= split.most[0]


@pytest.mark.parametrize(
    ("at", "expected"),
    [
        ({"pp": 4}, (8, 9, 6)),
        ({"pp": 2, "virtual_stages": 2, "schedule": "interleaved_1f1b"}, (17, 17, 15)),
        ({"pp": 2, "virtual_stages": 2, "schedule": "zbv"}, (14, 14, 18)),
        ({"pp": 64}, (0, 1, 0)),  # more stages than layers: refused elsewhere, as if even here
    ],
)
def test_the_split_of_layers_is_the_runtime_s(at: dict[str, Any], expected: tuple[int, int, int]) -> None:
    if "schedule" in at:
        at = {**at, "schedule": SCHEDULES.index(at["schedule"])}
    split = operators.runtime_stage_layers(Workload(family("llama-3.1-8b"), SEQUENCE), layouts(**at))
    assert (split.first[0], split.most[0], split.last[0]) == expected


def test_our_runtime_keeps_fp32_weights_and_gradients() -> None:
    assert our_runtime().state.weight + our_runtime().state.gradient == 8
