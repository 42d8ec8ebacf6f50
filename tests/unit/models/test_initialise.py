"""Initial weights follow from seed and name alone."""

import importlib
import math
import random
from unittest.mock import patch

import pytest
import torch
from tests.support.shrunk_families import TINY_FAMILIES, shrunk_family

from meshwright.models import build_decoder, initialise
from meshwright.models.initialise import fill_shard, initial_std, seed_of, tiles
from meshwright.spec.parameters import Parameter, parameters

initialise_module = importlib.import_module("meshwright.models.initialise")


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


@pytest.mark.parametrize("shape", [(11,), (11, 9), (3, 5, 9)])
def test_any_shard_holds_the_numbers_of_the_full_tensor(shape: tuple[int, ...]) -> None:
    """Shards that begin and end inside tiles of 4 x 4."""
    spec, parameter = shrunk_family("gpt2-124m"), Parameter("blocks.0.mlp.up.weight", shape, "matrix")
    generator = random.Random(0)
    with patch.object(initialise_module, "TILE", 4):
        full = torch.empty(shape)
        fill_shard(full, spec, parameter, 5)
        assert len(full.unique()) == full.numel()
        for _ in range(20):
            bounds = [sorted(generator.sample(range(size + 1), 2)) for size in shape]
            held = tuple(slice(*each) for each in bounds)
            shard = torch.empty(full[held].shape)
            with patch.object(initialise_module, "local_slices", return_value=held):
                fill_shard(shard, spec, parameter, 5)
            assert torch.equal(shard, full[held])


def test_a_shard_draws_only_the_tiles_that_it_touches() -> None:
    """One of 64 ranks that share 8192 rows."""
    shape = (8192, 8192)
    held = (slice(128, 256), slice(0, 8192))
    assert len(list(tiles(shape, held))) == 8 and len(list(tiles(shape, (slice(0, 0), held[1])))) == 0
    drawn = [math.prod(part.stop - part.start for part in tile) for tile in tiles(shape, held)]
    assert sum(drawn) == math.prod(shape) // 8  # a tile has the rows of eight ranks


def test_a_small_tensor_is_one_tile_with_the_seed_of_its_name() -> None:
    spec, parameter = shrunk_family("gpt2-124m"), Parameter("head.weight", (67, 32), "head")
    drawn = torch.empty(67, 32)
    fill_shard(drawn, spec, parameter, 5)
    expected = torch.empty(67, 32).normal_(
        0.0, spec.init_std, generator=torch.Generator().manual_seed(seed_of(5, "head.weight"))
    )
    assert torch.equal(drawn, expected)
