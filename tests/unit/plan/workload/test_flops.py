"""FLOPs per token against closed forms and numbers worked out by hand."""

import pytest

from meshwright.plan.workload.flops import (
    attention_flops_per_token,
    flops_per_token,
    mean_keys_seen,
)
from meshwright.spec import AttentionSpec, LatentSpec, MlpSpec, ModelSpec, MoeSpec, RopeSpec
from meshwright.spec.parameters import num_matmul_parameters


def gpt(*, layers: int, width: int, heads: int, vocab: int) -> ModelSpec:
    return ModelSpec(
        vocab_size=vocab,
        num_layers=layers,
        width=width,
        max_positions=2048,
        attention=AttentionSpec(num_heads=heads, num_kv_heads=heads, head_width=width // heads),
        mlp=MlpSpec(kind="gelu", width=4 * width, bias=True),
        positions="learned",
        norm="layer",
    )


def llama_8b(**changes: object) -> ModelSpec:
    model = ModelSpec(
        vocab_size=128256,
        num_layers=32,
        width=4096,
        max_positions=131072,
        attention=AttentionSpec(num_heads=32, num_kv_heads=8, head_width=128),
        mlp=MlpSpec(width=14336),
        rope=RopeSpec(theta=500000.0),
    )
    return model.with_(**changes)


# (layers, width, heads) of the smallest, a middle and the largest GPT of the Megatron weak-scaling table.
@pytest.mark.parametrize(("layers", "width", "heads"), [(24, 2304, 24), (48, 8192, 64), (128, 25600, 160)])
def test_gpt_closed_form(layers: int, width: int, heads: int) -> None:
    """72 B s l h^2 (1 + s/(6h) + V/(12 l h)) counts attention in full; the causal half is left out once."""
    sequence, vocab = 2048, 51200
    model = gpt(layers=layers, width=width, heads=heads, vocab=vocab)
    closed = 72 * layers * width**2 * (1 + sequence / (6 * width) + vocab / (12 * layers * width))
    causal_half = 6 * layers * width * sequence
    # The closed form is exact, so only rounding of doubles is allowed for.
    assert flops_per_token(model, sequence) + causal_half == pytest.approx(closed, rel=1e-12)
    assert attention_flops_per_token(model, sequence) == causal_half


def test_llama_8b_by_hand() -> None:
    """51.5 GFLOP per token at 8192, the number published tables use for the causal convention."""
    per_layer = 4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336
    expected_parameters = 32 * per_layer + 128256 * 4096
    assert num_matmul_parameters(llama_8b()) == expected_parameters == 7_504_658_432
    expected = 6 * 7_504_658_432 + 6 * 32 * 4096 * 8192
    assert flops_per_token(llama_8b(), 8192) == expected
    assert expected / 1e9 == pytest.approx(51.5, abs=0.05)  # the table prints one decimal


def test_head_counts_even_when_tied_and_the_lookup_never() -> None:
    assert flops_per_token(llama_8b(tied_head=True), 8192) == flops_per_token(llama_8b(), 8192)


def test_window_counts_only_what_is_seen() -> None:
    assert mean_keys_seen(8, None) == 4
    assert mean_keys_seen(8, 8) == 4
    assert mean_keys_seen(8, 100) == 4
    # Queries of a window of 2 over 8 see (1/2 + 3/2) + 6 x 2 keys, the diagonal counted half.
    assert mean_keys_seen(8, 2) == (0.5 + 1.5 + 6 * 2) / 8
    windowed = llama_8b(attention=llama_8b().attention.with_(window=1024))
    assert attention_flops_per_token(windowed, 8192) == 12 * 32 * 4096 * (1024 - 1024**2 / 16384)


def test_only_chosen_experts_count() -> None:
    """Mixtral 8x7B's shape: 2 of 8 experts, a router of 8 columns."""
    moe = MoeSpec(num_experts=8, top_k=2, width=14336)
    model = llama_8b(moe=moe, vocab_size=32000)
    per_layer = 4096 * 4096 * 2 + 4096 * 1024 * 2 + 2 * 3 * 4096 * 14336 + 4096 * 8
    assert num_matmul_parameters(model) == 32 * per_layer + 32000 * 4096


def test_shared_expert_and_dense_first_layers() -> None:
    moe = MoeSpec(num_experts=64, top_k=6, width=100, shared_width=200, first_dense_layers=1)
    model = llama_8b(moe=moe, num_layers=3)
    attention = 4096 * 4096 * 2 + 4096 * 1024 * 2
    routed = 3 * 4096 * (6 * 100 + 200) + 4096 * 64
    assert num_matmul_parameters(model) == 3 * attention + 3 * 4096 * 14336 + 2 * routed + 128256 * 4096


@pytest.mark.parametrize("query_rank", [None, 1536])
def test_latent_attention_by_hand(query_rank: int | None) -> None:
    latent = LatentSpec(query_rank=query_rank, kv_rank=512, nope_width=128, rope_width=64, value_width=128)
    attention = AttentionSpec(num_heads=16, num_kv_heads=16, head_width=192, latent=latent)
    model = llama_8b(attention=attention, width=2048, num_layers=1, mlp=MlpSpec(width=1), vocab_size=1)
    query = 2048 * 16 * 192 if query_rank is None else 2048 * 1536 + 1536 * 16 * 192
    key_value = 2048 * (512 + 64) + 512 * 16 * (128 + 128)
    assert num_matmul_parameters(model) == query + key_value + 16 * 128 * 2048 + 3 * 2048 + 2048
    # Scores use 192 dims per head and values 128; each is 2 x 3 FLOPs per key seen, and half are seen.
    assert attention_flops_per_token(model, 4096) == 6 * 16 * (192 + 128) * 4096 / 2
