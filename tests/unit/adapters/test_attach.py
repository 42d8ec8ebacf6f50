"""Adapters of one model: names, shapes, initial values, dropout, and what is frozen."""

import pytest
import torch
from tests.support.dropped_decoder import keys_of_tokens, mask_of
from tests.support.runs import MODELS

from meshwright.adapters.attach import attach_adapters
from meshwright.models.decoder import Decoder, build_decoder
from meshwright.models.initialise import initialise
from meshwright.models.layers.adapter import Adapter, AdapterDropout
from meshwright.models.layers.token_rows import TokenRows
from meshwright.spec import AdapterSpec
from meshwright.spec.adapter import adapted_matrices, adapter_parameters, is_trained

LORA = AdapterSpec(rank=3, alpha=8)


def decoder(kind: str, adapter: AdapterSpec) -> Decoder:
    model = build_decoder(MODELS[kind])
    attach_adapters(model, adapter, torch.float32)
    initialise(model, 1)
    return model


@pytest.mark.parametrize("kind", ["gqa", "gpt", "mla", "moe_shared"])
def test_the_list_of_parameters_is_that_of_the_modules(kind: str) -> None:
    built = {name: tuple(p.shape) for name, p in decoder(kind, LORA).named_parameters() if "adapter" in name}
    listed = adapter_parameters(MODELS[kind], LORA)
    assert built == {one.name: one.shape for one in listed}
    assert all(is_trained(name, LORA, ()) for name in built)
    assert not any(is_trained(one.weight.name, LORA, ()) for one in adapted_matrices(MODELS[kind], LORA))


def test_initial_values_are_those_of_peft() -> None:
    """A is uniform in +-1 / sqrt(inputs), B is zero: the adapted model is the base."""
    parameters = {name: p.detach() for name, p in decoder("gqa", LORA).named_parameters()}
    a = parameters["blocks.0.mlp.down.adapter.lora_A"]
    assert a.abs().max() <= 24**-0.5
    assert a.std() == pytest.approx(24**-0.5 / 3**0.5, rel=0.15)
    assert not parameters["blocks.0.mlp.down.adapter.lora_B"].any()


def test_targets_by_our_names_hugging_face_names_and_patterns() -> None:
    def names(*targets: str) -> list[str]:
        return [one.weight.name for one in adapted_matrices(MODELS["gqa"], LORA.with_(targets=targets))]

    assert names("query") == names("q_proj") == [f"blocks.{n}.attention.query.weight" for n in (0, 1)]
    assert names("blocks.1.mlp.*") == [f"blocks.1.mlp.{own}.weight" for own in ("gate", "up", "down")]
    assert len(names("all-linear")) == 14


def test_scales() -> None:
    ranks = [{"pattern": "down", "rank": 4, "alpha": 2.0}]
    found = {one.weight.name: one for one in adapted_matrices(MODELS["gqa"], LORA.with_(ranks=ranks))}
    assert found["blocks.0.mlp.down.weight"].scale == 0.5
    assert found["blocks.0.mlp.up.weight"].scale == pytest.approx(8 / 3)
    (rs, *_) = adapted_matrices(MODELS["gqa"], LORA.with_(kind="rslora"))
    assert rs.scale == pytest.approx(8 / 3**0.5)


def test_dropout_is_on_the_input_of_a() -> None:
    adapter = Adapter(16, 12, rank=3, scale=2.0, dropout=AdapterDropout(0.5, "mlp.up.weight"))
    torch.nn.init.normal_(adapter.lora_A)
    torch.nn.init.normal_(adapter.lora_B)
    x, y = torch.randn(5, 16), torch.randn(5, 12)
    keys = keys_of_tokens(4, 0, 1, 5)[0]
    dropped = x * mask_of(keys, "mlp.up.weight", 16, 0.5).float()
    found = adapter(x, y, dropout_keys=torch.from_numpy(keys.view("int64")))
    torch.testing.assert_close(found, y + 2.0 * (dropped @ adapter.lora_A.T) @ adapter.lora_B.T)
    adapter.eval()
    torch.testing.assert_close(adapter(x, y), y + 2.0 * (x @ adapter.lora_A.T) @ adapter.lora_B.T)


def test_dropout_without_keys_is_a_mistake() -> None:
    """Rather than training without dropout."""
    adapter = Adapter(4, 4, rank=2, scale=1.0, dropout=AdapterDropout(0.5, "mlp.up.weight"))
    with pytest.raises(AssertionError, match="needs the keys of a batch"):
        adapter(torch.randn(5, 4), torch.randn(5, 4))


def test_trained_rows_of_a_part_of_each_sequence() -> None:
    """Without the warning that torch gives of a view."""
    rows = TokenRows((9, 2), 3)
    rows.set_ids()
    torch.nn.init.normal_(rows.change)
    ids_BS = torch.arange(16).view(2, 8).chunk(2, 1)[0]
    expected = torch.zeros(2, 4, 3)
    expected[0, 2], expected[1, 1] = rows.change.detach()
    torch.testing.assert_close(rows(ids_BS).detach(), expected)
