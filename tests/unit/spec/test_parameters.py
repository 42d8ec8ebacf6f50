"""The list of parameters is the built model's, at full size too."""

import pytest

from meshwright.models import build_decoder
from meshwright.spec.families import FAMILIES, family
from meshwright.spec.parameters import (
    num_active_parameters,
    num_matmul_parameters,
    num_parameters,
    parameters,
)

FULL_SIZE = ["gpt2-1.5b", "gpt3-175b", "llama-3.1-405b", "qwen3-32b", "mixtral-8x22b", "deepseek-v3"]


@pytest.mark.parametrize("name", FULL_SIZE)
def test_full_size_equals_the_built_model(name: str) -> None:
    model = build_decoder(family(name))
    built = [(key, tuple(value.shape)) for key, value in model.named_parameters()]
    assert built == [(parameter.name, parameter.shape) for parameter in parameters(family(name))]
    assert num_parameters(family(name)) == sum(value.numel() for value in model.parameters())


def test_all_parameters_of_dense_models_are_active() -> None:
    for model in FAMILIES.values():
        if model.moe is None:
            assert num_active_parameters(model) == num_parameters(model)


def test_matmul_parameters_count_the_head_and_not_the_lookup() -> None:
    tied, untied = family("llama-3.2-1b"), family("llama-3.1-8b")
    for model in (tied, untied):
        outside = sum(p.num_elements for p in parameters(model) if p.kind in ("norm", "bias", "embedding"))
        head = model.vocab_size * model.width if model.tied_head else 0
        assert num_matmul_parameters(model) == num_parameters(model) - outside + head


def test_matmul_parameters_count_chosen_experts_only() -> None:
    model = family("mixtral-8x7b")
    attention = 2 * 4096 * 4096 + 2 * 4096 * 1024
    experts = 2 * 3 * 4096 * 14336
    router = 8 * 4096
    assert num_matmul_parameters(model) == 32 * (attention + experts + router) + 32000 * 4096


def test_layers_are_known() -> None:
    listed = parameters(family("deepseek-v2-lite"))
    assert {parameter.layer for parameter in listed} == {None, *range(27)}
    assert {p.layer for p in listed if p.kind == "expert"} == set(range(1, 27))
