"""Initial weights follow from seed and name alone."""

import math

import torch
from tests.support.shrunk_families import TINY_FAMILIES, shrunk_family

from meshwright.models import build_decoder, initialise
from meshwright.models.initialise import initial_std
from meshwright.spec.parameters import parameters


def test_stages_hold_the_weights_of_the_full_model() -> None:
    for name in TINY_FAMILIES:
        spec = shrunk_family(name)
        full = build_decoder(spec)
        initialise(full, 7)
        for layers, has_embedding, has_head in ((range(1), True, False), (range(1, 3), False, True)):
            stage = build_decoder(spec, layers=layers, has_embedding=has_embedding, has_head=has_head)
            initialise(stage, 7)
            for key, value in stage.state_dict().items():
                assert torch.equal(value, full.state_dict()[key]), (name, key)


def test_dtypes_start_from_the_same_numbers() -> None:
    spec = shrunk_family("deepseek-v3")
    models = [build_decoder(spec, dtype=dtype) for dtype in (torch.float32, torch.float64, torch.bfloat16)]
    for model in models:
        initialise(model, 1)
    for key, value in models[0].state_dict().items():
        assert torch.equal(models[1].state_dict()[key], value.double())
        assert torch.equal(models[2].state_dict()[key], value.to(models[2].state_dict()[key].dtype))


def test_seeds_and_names_give_different_numbers() -> None:
    spec = shrunk_family("llama-2-7b")
    first, second = build_decoder(spec), build_decoder(spec)
    initialise(first, 0)
    initialise(second, 1)
    key = "blocks.0.attention.query.weight"
    other = "blocks.1.attention.query.weight"
    assert not torch.equal(first.state_dict()[key], second.state_dict()[key])
    assert not torch.equal(first.state_dict()[key], first.state_dict()[other])


def test_every_kind_of_tensor() -> None:
    spec = shrunk_family("gpt2-124m")
    model = build_decoder(spec)
    initialise(model, 0)
    state = model.state_dict()
    assert torch.equal(state["norm.weight"], torch.ones(32))
    assert not state["blocks.0.attention.query.bias"].any()
    # 67 x 32 draws: the sample's deviation is within 5 % of the true one by more than 3 sigma.
    assert math.isclose(float(state["embedding.tokens.weight"].std()), 0.02, rel_tol=0.05)
    assert math.isclose(float(state["blocks.1.mlp.down.weight"].std()), 0.02 / math.sqrt(6), rel_tol=0.1)


def test_projections_into_the_residual_start_smaller_when_asked() -> None:
    spec = shrunk_family("mixtral-8x7b")
    smaller = {
        p.name.split(".", 2)[2] for p in parameters(spec) if p.layer == 0 and initial_std(spec, p) < 0.02
    }
    assert smaller == {"attention.output.weight", "mlp.experts.down"}
    plain = spec.with_(scaled_residual_init=False)
    assert {initial_std(plain, parameter) for parameter in parameters(plain)} == {0.02}


def test_the_balance_bias_survives_a_cast() -> None:
    model = build_decoder(shrunk_family("deepseek-v3"))
    initialise(model, 0)
    bias = model.blocks["1"].mlp.router.balance_bias
    bias += 1.0009765625  # not a bf16 number
    model.to(torch.bfloat16)
    assert torch.equal(model.blocks["1"].mlp.router.balance_bias, torch.full((8,), 1.0009765625))
