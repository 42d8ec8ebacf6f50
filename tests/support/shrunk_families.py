"""Model families with small sizes: every feature of the real family, trained in a moment."""

from meshwright.spec import ModelSpec
from meshwright.spec.families import family

TINY_FAMILIES = (
    "gpt2-124m",
    "megatron-1.7b",
    "llama-2-7b",
    "llama-3.1-8b",
    "llama-3.2-1b",
    "qwen2.5-0.5b",
    "qwen2.5-7b",
    "qwen3-0.6b",
    "qwen3-8b",
    "qwen3-30b-a3b",
    "mistral-7b",
    "mixtral-8x7b",
    "deepseek-v2-lite",
    "deepseek-v3",
)


def shrunk_family(name: str, **changes: object) -> ModelSpec:
    """The family with small widths and few layers; head structure, norms, biases and routing stay."""
    model = family(name)
    attention = model.attention
    num_heads = 4
    num_kv_heads = 4 if attention.num_kv_heads == attention.num_heads else 2
    small_attention = attention.with_(num_heads=num_heads, num_kv_heads=num_kv_heads, head_width=8)
    if attention.latent is not None:
        query_rank = 12 if attention.latent.query_rank else None
        latent = {"query_rank": query_rank, "kv_rank": 8, "nope_width": 6, "rope_width": 4, "value_width": 5}
        small_attention = small_attention.with_(latent=latent, head_width=10)
    if attention.window is not None:
        small_attention = small_attention.with_(window=5)
    small = {
        "vocab_size": 67,
        "num_layers": 3,
        "width": 32,
        "max_positions": 64,
        "attention": small_attention,
        "mlp": model.mlp.with_(width=40),
        "moe": _small_moe(model),
    }
    return model.with_(**{**small, **changes})


def _small_moe(model: ModelSpec) -> object:
    if model.moe is None:
        return None
    is_deepseek = model.moe.first_dense_layers > 0
    width = 24 if is_deepseek else 40
    return model.moe.with_(
        num_experts=8,
        top_k=min(model.moe.top_k, 3),
        width=width,
        shared_width=2 * width if model.moe.shared_width else 0,
        first_dense_layers=min(model.moe.first_dense_layers, 1),
        num_groups=4 if model.moe.num_groups > 1 else 1,
        top_groups=2 if model.moe.num_groups > 1 else 1,
    )
