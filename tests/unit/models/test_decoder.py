"""The decoder's own promises: names, stages, documents, windows, dtypes, loss as a weighted sum."""

import pytest
import torch
from tests.support.documents import document_arguments
from tests.support.shrunk_families import TINY_FAMILIES, shrunk_family
from torch import Tensor

from meshwright.models import Decoder, build_decoder, initialise
from meshwright.models.layers.attend import Attend, causal_mask
from meshwright.models.layers.rope import RopeTables, apply_rope, rope_tables
from meshwright.spec import ModelSpec, RopeSpec
from meshwright.spec.parameters import parameters

# float64 with sums in another order.
SAME_FLOAT64 = {"rtol": 1e-11, "atol": 1e-12}


def _model(spec: ModelSpec, dtype: torch.dtype = torch.float64, seed: int = 0) -> Decoder:
    model = build_decoder(spec.with_(init_std=0.2), dtype=dtype)
    initialise(model, seed)
    return model


def _tokens(num_sequences: int, num_positions: int, seed: int = 0) -> Tensor:
    return torch.randint(67, (num_sequences, num_positions), generator=torch.Generator().manual_seed(seed))


def _positions(tokens_BS: Tensor) -> Tensor:
    return torch.arange(tokens_BS.shape[1]).expand_as(tokens_BS)


def _loss(model: Decoder, tokens_BS: Tensor, **rest: Tensor) -> Tensor:
    """Every position but the last predicts its right neighbour."""
    settings = {"positions_BS": _positions(tokens_BS), **rest}
    targets_BS = torch.cat((tokens_BS[:, 1:], torch.full_like(tokens_BS[:, :1], -100)), dim=1)
    return model(tokens_BS, **{"targets_BS": targets_BS, **settings})


@pytest.mark.parametrize("name", TINY_FAMILIES)
def test_parameters_are_the_listed_ones(name: str) -> None:
    spec = shrunk_family(name)
    built = [(key, tuple(value.shape)) for key, value in build_decoder(spec).named_parameters()]
    assert built == [(parameter.name, parameter.shape) for parameter in parameters(spec)]


@pytest.mark.parametrize("name", TINY_FAMILIES)
def test_every_parameter_gets_a_gradient(name: str) -> None:
    model = _model(shrunk_family(name))
    tokens_BS = _tokens(2, 16)
    _loss(model, tokens_BS, sequence_weights_B=torch.full((2,), 0.5)).backward()
    without = [key for key, value in model.named_parameters() if value.grad is None or not value.grad.any()]
    # A bias of all keys shifts every score of a query equally, so softmax cancels it without RoPE.
    assert [key for key in without if not key.endswith("key.bias")] == []


@pytest.mark.parametrize("name", ["gpt2-124m", "llama-3.1-8b", "deepseek-v3"])
def test_the_loss_is_a_weighted_sum(name: str) -> None:
    model = _model(shrunk_family(name))
    tokens_BS, targets_BS = _tokens(2, 9), _tokens(2, 9, seed=1)
    weights_BS = torch.rand(2, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    logits_BSV = model(tokens_BS, positions_BS=_positions(tokens_BS))
    each_BS = -logits_BSV.log_softmax(-1).gather(-1, targets_BS[..., None]).squeeze(-1)
    loss = model(tokens_BS, positions_BS=_positions(tokens_BS), targets_BS=targets_BS, weights_BS=weights_BS)
    torch.testing.assert_close(loss, (each_BS * weights_BS).sum(), **SAME_FLOAT64)


@pytest.mark.parametrize("name", TINY_FAMILIES)
def test_stages_compose_to_the_full_model(name: str) -> None:
    """Loss and gradients of three stages equal the full model's, from the same seed."""
    spec = shrunk_family(name).with_(init_std=0.2)
    full = _model(spec)
    stages = [
        build_decoder(spec, layers=range(1), has_head=False, dtype=torch.float64),
        build_decoder(spec, layers=range(1, 2), has_embedding=False, has_head=False, dtype=torch.float64),
        build_decoder(spec, layers=range(2, 3), has_embedding=False, dtype=torch.float64),
    ]
    tokens_BS = _tokens(2, 12)
    common = {"positions_BS": _positions(tokens_BS), "sequence_weights_B": torch.full((2,), 0.5)}
    x = tokens_BS
    for stage in stages:
        initialise(stage, 0)
        x = stage(x, **common, **({"targets_BS": tokens_BS} if stage.head else {}))
    loss = full(tokens_BS, **common, targets_BS=tokens_BS)
    torch.testing.assert_close(x, loss, rtol=0, atol=0)
    x.backward()
    loss.backward()
    grads = _summed_gradients(stages)
    assert grads.keys() == dict(full.named_parameters()).keys()
    for key, parameter in full.named_parameters():
        torch.testing.assert_close(grads[key], parameter.grad, **SAME_FLOAT64)


def _summed_gradients(stages: list[Decoder]) -> dict[str, Tensor]:
    """A tied table stands in the first and in the last stage."""
    grads: dict[str, Tensor] = {}
    for stage in stages:
        for key, parameter in stage.named_parameters():
            assert parameter.grad is not None
            grads[key] = grads.get(key, torch.zeros_like(parameter)) + parameter.grad
    return grads


@pytest.mark.parametrize("name", TINY_FAMILIES)
def test_packed_documents_do_not_see_each_other(name: str) -> None:
    """loss(pack(a, b)) == loss(a) + loss(b)."""
    model = _model(shrunk_family(name))
    first, second = _tokens(1, 7), _tokens(1, 11, seed=3)
    packed = torch.cat((first, second), dim=1)
    targets_BS = torch.cat((packed[:, 1:], torch.tensor([[-100]])), dim=1)
    targets_BS[:, 6] = -100  # the last token of the first document has nothing to predict
    loss = model(
        packed,
        positions_BS=torch.cat((_positions(first), _positions(second)), dim=1),
        **document_arguments(torch.tensor([[0] * 7 + [1] * 11])),
        targets_BS=targets_BS,
    )
    torch.testing.assert_close(loss, _loss(model, first) + _loss(model, second), **SAME_FLOAT64)


def test_one_document_per_row_needs_no_mask() -> None:
    model = _model(shrunk_family("llama-3.1-8b"))
    tokens_BS = _tokens(2, 10)
    separate = _loss(model, tokens_BS, **document_arguments(torch.zeros(2, 10, dtype=torch.int64)))
    torch.testing.assert_close(separate, _loss(model, tokens_BS), **SAME_FLOAT64)


@pytest.mark.parametrize("window", [1, 3, 8, 50])
def test_a_window_equals_the_dense_mask(window: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 8, 4, 6, dtype=torch.float64, generator=generator)
    k, v = torch.randn(2, 2, 8, 2, 6, dtype=torch.float64, generator=generator)
    out = Attend()(q, k, v, documents=None, positions_BS=_positions(q[..., 0, 0]), window=window, scale=0.4)
    scores = torch.einsum("bshk,bthk->bhst", q, k.repeat_interleave(2, dim=2)) * 0.4
    for i in range(8):
        for j in range(8):
            if j > i or i - j >= window:
                scores[:, :, i, j] = float("-inf")
    expected = torch.einsum("bhst,bthk->bshk", scores.softmax(-1), v.repeat_interleave(2, dim=2))
    torch.testing.assert_close(out, expected, **SAME_FLOAT64)


def test_the_mask_joins_cause_window_and_document() -> None:
    mask = causal_mask(4, torch.tensor([[0, 0, 1, 1]]), 2, torch.device("cpu"))
    expected = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    assert mask[0, 0].int().tolist() == expected


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_depends_on_distance_only(interleaved: bool) -> None:
    rope = RopeSpec(interleaved=interleaved)
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)

    def score(query_at: int, key_at: int) -> Tensor:
        rotated = [_rotated(x, rope, at) for x, at in ((q, query_at), (k, key_at))]
        return (rotated[0] * rotated[1]).sum()

    torch.testing.assert_close(score(3, 1), score(13, 11), **SAME_FLOAT64)
    assert not torch.isclose(score(3, 1), score(3, 2))


def _rotated(x: Tensor, rope: RopeSpec, position: int) -> Tensor:
    return apply_rope(x, rope_tables(rope, torch.tensor([[position]]), width=8, dtype=torch.float64))


def test_rope_keeps_the_dtype_and_computes_in_fp32() -> None:
    x = torch.randn(1, 5, 2, 8).bfloat16()
    rope = rope_tables(RopeSpec(), torch.arange(5)[None], width=8, dtype=torch.float32)
    assert isinstance(rope, RopeTables) and rope.cos_BSK.dtype == torch.float32
    assert torch.equal(apply_rope(x, rope), apply_rope(x.float(), rope).bfloat16())


@pytest.mark.parametrize("name", ["gpt2-124m", "llama-3.1-8b", "deepseek-v3", "mixtral-8x7b"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_and_16_bit_weights_stay_close(name: str, dtype: torch.dtype) -> None:
    """Norms, tables, router and loss stay in fp32, so the loss changes by rounding only."""
    spec = shrunk_family(name)
    tokens_BS = _tokens(2, 12)
    reference = build_decoder(spec)
    initialise(reference, 0)
    expected = _loss(reference, tokens_BS) / 22
    with torch.autocast("cpu", dtype=dtype):
        cast = _loss(reference, tokens_BS) / 22
    lowered = build_decoder(spec, dtype=dtype)
    initialise(lowered, 0)
    lowered_loss = _loss(lowered, tokens_BS) / 22
    assert cast.dtype == lowered_loss.dtype == torch.float32
    # 2^-8 relative rounding of bf16 on logits of order 0.1 moves a loss of 4.2 by far less than this.
    torch.testing.assert_close(cast, expected, rtol=5e-3, atol=0)
    torch.testing.assert_close(lowered_loss, expected, rtol=5e-3, atol=0)


def test_dropout_acts_in_training_only() -> None:
    model = _model(shrunk_family("gpt2-124m").with_(dropout=0.5))
    tokens_BS = _tokens(1, 8)
    model.train()
    assert not torch.equal(_loss(model, tokens_BS), _loss(model, tokens_BS))
    model.eval()
    assert torch.equal(_loss(model, tokens_BS), _loss(model, tokens_BS))


def test_attention_dropout_acts_in_training_only() -> None:
    spec = shrunk_family("gpt2-124m")
    model = _model(spec.with_(attention=spec.attention.with_(dropout=0.5)))
    tokens_BS = _tokens(1, 8)
    assert not torch.equal(_loss(model, tokens_BS), _loss(model, tokens_BS))
    model.eval()
    assert torch.equal(_loss(model, tokens_BS), _loss(model, tokens_BS))
