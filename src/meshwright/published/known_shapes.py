"""Published MoE models whose shape a table row does not fully give: experts, top-k, head widths.

The columns of a table give layers, hidden, ffn, heads, kv_heads and vocab. A routed model is recognised by
these columns (never by its name) among the families and the models below.
"""

from functools import cache

from meshwright.spec.families import FAMILIES
from meshwright.spec.model import AttentionSpec, LatentSpec, MlpSpec, ModelSpec, MoeSpec, RopeSpec


def _gpt_oss(name: str, num_layers: int, num_experts: int) -> ModelSpec:
    # Every other layer has a window of 128 keys; this window gives the same mean over 4096 tokens.
    attention = AttentionSpec(num_heads=64, num_kv_heads=8, head_width=64, qkv_bias=True, window=1300)
    return ModelSpec(
        family=name,
        vocab_size=201088,
        num_layers=num_layers,
        width=2880,
        max_positions=131072,
        attention=attention,
        mlp=MlpSpec(width=2880),
        moe=MoeSpec(num_experts=num_experts, top_k=4, width=2880),
        rope=RopeSpec(),
    )


def _qwen3_235b() -> ModelSpec:
    return ModelSpec(
        family="qwen3-235b-a22b",
        vocab_size=151936,
        num_layers=94,
        width=4096,
        max_positions=40960,
        attention=AttentionSpec(num_heads=64, num_kv_heads=4, head_width=128, qk_norm=True),
        mlp=MlpSpec(width=12288),
        moe=MoeSpec(num_experts=128, top_k=8, width=1536),
        rope=RopeSpec(),
    )


def _latent(name: str, num_layers: int, width: int, heads: int, vocab: int, moe: MoeSpec) -> ModelSpec:
    latent = LatentSpec(
        query_rank=1536 if width > 4096 else None, kv_rank=512, nope_width=128, rope_width=64, value_width=128
    )
    return ModelSpec(
        family=name,
        vocab_size=vocab,
        num_layers=num_layers,
        width=width,
        max_positions=131072,
        attention=AttentionSpec(num_heads=heads, num_kv_heads=heads, head_width=192, latent=latent),
        mlp=MlpSpec(width=18432 if width > 4096 else 11264),
        moe=moe,
        rope=RopeSpec(),
    )


_OTHERS = (
    _gpt_oss("gpt-oss-120b", 36, 128),
    _gpt_oss("gpt-oss-20b", 24, 32),
    _qwen3_235b(),
    _latent(
        "kimi-k2",
        61,
        7168,
        64,
        163840,
        MoeSpec(num_experts=384, top_k=8, width=2048, shared_width=2048, first_dense_layers=1),
    ),
    _latent(
        "moonlight-16b-a3b",
        27,
        2048,
        16,
        163840,
        MoeSpec(num_experts=64, top_k=6, width=1408, shared_width=2816, first_dense_layers=1),
    ),
)


@cache
def _index() -> dict[tuple[int, ...], ModelSpec]:
    routed = [model for model in (*FAMILIES.values(), *_OTHERS) if model.moe is not None]
    return {_key(model): model for model in routed}


def _key(model: ModelSpec) -> tuple[int, ...]:
    assert model.moe is not None
    attention = model.attention
    return (model.num_layers, model.width, model.moe.width, attention.num_heads, model.vocab_size)


def routed_shape(layers: int, hidden: int, ffn: int, heads: int, vocab: int) -> ModelSpec | None:
    """The routed model with these columns, or None."""
    return _index().get((layers, hidden, ffn, heads, vocab))
