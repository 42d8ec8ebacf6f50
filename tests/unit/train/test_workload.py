"""Model FLOPs of a token where some weights are frozen."""

import pytest
from tests.support.runs import MODELS, tiny_run

from meshwright.plan.workload.flops import flops_per_token
from meshwright.spec import AdapterSpec
from meshwright.spec.adapter import adapter_parameters
from meshwright.spec.parameters import num_matmul_parameters
from meshwright.train.workload import trained_flops_per_token

LORA = AdapterSpec(rank=2, alpha=4)


@pytest.mark.parametrize("model", ["gqa", "tied"])
def test_frozen_weights_count_four_and_adapters_six(model: str) -> None:
    run = tiny_run(model)
    full = flops_per_token(run.model, run.data.sequence_length)
    assert trained_flops_per_token(run) == full
    adapters = sum(one.num_elements for one in adapter_parameters(run.model, LORA))
    expected = full - 2 * num_matmul_parameters(run.model) + 6 * adapters
    assert trained_flops_per_token(run.with_(adapter=LORA)) == expected


def test_of_routed_experts_the_chosen_ones_count() -> None:
    run = tiny_run("moe").with_(adapter=LORA.with_(targets=("blocks.0.mlp.experts.down",)))
    down = 2 * (12 + 16) * MODELS["moe"].moe.top_k
    full = flops_per_token(run.model, run.data.sequence_length)
    assert trained_flops_per_token(run) == full - 2 * num_matmul_parameters(run.model) + 6 * down


def test_trained_parameters_count_six() -> None:
    run = tiny_run("gqa").with_(train_only=("head.weight",))
    head = run.model.vocab_size * run.model.width
    full = flops_per_token(run.model, run.data.sequence_length)
    assert trained_flops_per_token(run) == full - 2 * (num_matmul_parameters(run.model) - head)
