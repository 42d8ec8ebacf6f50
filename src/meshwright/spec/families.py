"""Published model families as values of `ModelSpec`, one short block each.

Dropout is off in all of them: it belongs to the original training, not to the architecture. The
coefficients of MoE balancing are those of the original training.
"""

import difflib

from meshwright.errors import SpecError
from meshwright.spec.hub_ids import HUB_IDS, family_of_hub_id, hub_id_of
from meshwright.spec.model import (
    AttentionSpec,
    LatentSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    RopeScalingSpec,
    RopeSpec,
)


def is_family(name: str) -> bool:
    """Whether this is the name of a family, or the Hugging Face hub id of one."""
    return name.strip().lower() in FAMILIES or family_of_hub_id(name) is not None


def family(name: str) -> ModelSpec:
    """The family of this name or hub id; an unknown one is refused with the nearest names."""
    found = FAMILIES.get(family_of_hub_id(name) or name.strip().lower())
    if found is not None:
        return found
    hub_id = hub_id_of(name)
    if hub_id is not None:
        raise _unknown_hub_id(hub_id)
    near = difflib.get_close_matches(name.lower(), FAMILIES, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else "`meshwright models list` shows all families"
    raise SpecError(f"no model family is called {name!r}", where="model", hint=hint)


def _unknown_hub_id(hub_id: str) -> SpecError:
    lower = {each.lower(): each for each in HUB_IDS}
    near = [lower[each] for each in difflib.get_close_matches(hub_id.lower(), lower, n=3, cutoff=0.6)]
    nearest = f"did you mean {' or '.join(near)}? " if near else ""
    return SpecError(
        f"{hub_id!r} is neither a folder here nor the hub id of a known family",
        where="model",
        hint=f"{nearest}any other model is named by its config.json: download that file, then name it or "
        "its folder",
    )


def _gpt(
    name: str, num_layers: int, width: int, num_heads: int, *, vocab_size: int, max_positions: int
) -> ModelSpec:
    head_width = width // num_heads
    return ModelSpec(
        family=name,
        vocab_size=vocab_size,
        num_layers=num_layers,
        width=width,
        max_positions=max_positions,
        attention=AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_width=head_width,
            qkv_bias=True,
            output_bias=True,
        ),
        mlp=MlpSpec(kind="gelu_tanh", width=4 * width, bias=True),
        norm="layer",
        positions="learned",
        tied_head=True,
    )


def _gpt2(name: str, num_layers: int, width: int, num_heads: int) -> ModelSpec:
    return _gpt(name, num_layers, width, num_heads, vocab_size=50257, max_positions=1024)


def _gpt3(name: str, num_layers: int, width: int, num_heads: int) -> ModelSpec:
    return _gpt(name, num_layers, width, num_heads, vocab_size=50257, max_positions=2048)


def _megatron(name: str, num_layers: int, width: int, num_heads: int) -> ModelSpec:
    return _gpt(name, num_layers, width, num_heads, vocab_size=51200, max_positions=2048)


def _llama(
    name: str, num_layers: int, width: int, heads: tuple[int, int], mlp_width: int, **rest: object
) -> ModelSpec:
    """RMSNorm, SwiGLU, rotary; `heads` are (query heads, key/value heads). `rest` are fields of ModelSpec."""
    attention = AttentionSpec(num_heads=heads[0], num_kv_heads=heads[1], head_width=width // heads[0])
    fields = {
        "family": name,
        "num_layers": num_layers,
        "width": width,
        "attention": attention,
        "mlp": MlpSpec(width=mlp_width),
        "rope": RopeSpec(),
        **rest,
    }
    return ModelSpec.model_validate(fields)


def _llama2(name: str, num_layers: int, width: int, heads: tuple[int, int], mlp_width: int) -> ModelSpec:
    return _llama(name, num_layers, width, heads, mlp_width, vocab_size=32000, max_positions=4096)


def _llama3(
    name: str,
    num_layers: int,
    width: int,
    heads: tuple[int, int],
    mlp_width: int,
    *,
    factor: float = 8,
    tied_head: bool = False,
) -> ModelSpec:
    rope = RopeSpec(theta=500000.0, scaling=RopeScalingSpec(kind="llama3", factor=factor))
    return _llama(
        name,
        num_layers,
        width,
        heads,
        mlp_width,
        vocab_size=128256,
        max_positions=131072,
        rope=rope,
        tied_head=tied_head,
    )


def _qwen25(
    name: str, num_layers: int, width: int, heads: tuple[int, int], mlp_width: int, *, small: bool = False
) -> ModelSpec:
    """The sizes up to 3B tie the head and were trained for 32k positions."""
    head_width = width // heads[0]
    return _llama(
        name,
        num_layers,
        width,
        heads,
        mlp_width,
        vocab_size=151936 if small else 152064,
        max_positions=32768 if small else 131072,
        attention=AttentionSpec(
            num_heads=heads[0], num_kv_heads=heads[1], head_width=head_width, qkv_bias=True
        ),
        norm_eps=1e-5 if num_layers >= 48 else 1e-6,
        rope=RopeSpec(theta=1e6),
        tied_head=small,
    )


def _qwen3(
    name: str,
    num_layers: int,
    width: int,
    heads: tuple[int, int],
    mlp_width: int,
    *,
    tied_head: bool = False,
    moe: MoeSpec | None = None,
) -> ModelSpec:
    return _llama(
        name,
        num_layers,
        width,
        heads,
        mlp_width,
        vocab_size=151936,
        max_positions=40960,
        attention=AttentionSpec(num_heads=heads[0], num_kv_heads=heads[1], head_width=128, qk_norm=True),
        norm_eps=1e-6,
        rope=RopeSpec(theta=1e6),
        tied_head=tied_head,
        moe=moe,
    )


def _mistral() -> ModelSpec:
    return _llama(
        "mistral-7b",
        32,
        4096,
        (32, 8),
        14336,
        vocab_size=32000,
        max_positions=32768,
        attention=AttentionSpec(num_heads=32, num_kv_heads=8, head_width=128, window=4096),
    )


def _mixtral(
    name: str, num_layers: int, width: int, heads: tuple[int, int], mlp_width: int, max_positions: int
) -> ModelSpec:
    return _llama(
        name,
        num_layers,
        width,
        heads,
        mlp_width,
        vocab_size=32000,
        max_positions=max_positions,
        rope=RopeSpec(theta=1e6),
        moe=MoeSpec(num_experts=8, top_k=2, width=mlp_width, aux_loss=0.001 if width > 4096 else 0.02),
    )


def _deepseek(
    name: str, num_layers: int, width: int, *, latent: LatentSpec, num_heads: int, **rest: object
) -> ModelSpec:
    head_width = latent.nope_width + latent.rope_width
    fields = {
        "family": name,
        "num_layers": num_layers,
        "width": width,
        "max_positions": 163840,
        "attention": AttentionSpec(
            num_heads=num_heads, num_kv_heads=num_heads, head_width=head_width, latent=latent
        ),
        "norm_eps": 1e-6,
        **rest,
    }
    return ModelSpec.model_validate(fields)


def _deepseek_rope(mscale: float) -> RopeSpec:
    scaling = RopeScalingSpec(
        kind="yarn", factor=40, original_positions=4096, mscale=mscale, mscale_all_dims=mscale
    )
    return RopeSpec(interleaved=True, scaling=scaling)


def _deepseek_v2_lite() -> ModelSpec:
    return _deepseek(
        "deepseek-v2-lite",
        27,
        2048,
        num_heads=16,
        latent=LatentSpec(kv_rank=512, nope_width=128, rope_width=64, value_width=128),
        vocab_size=102400,
        mlp=MlpSpec(width=10944),
        moe=MoeSpec(
            num_experts=64,
            top_k=6,
            width=1408,
            shared_width=2 * 1408,
            first_dense_layers=1,
            normalise_top_k=False,
            aux_loss=0.001,
        ),
        rope=_deepseek_rope(0.707),
    )


def _deepseek_v3() -> ModelSpec:
    return _deepseek(
        "deepseek-v3",
        61,
        7168,
        num_heads=128,
        latent=LatentSpec(query_rank=1536, kv_rank=512, nope_width=128, rope_width=64, value_width=128),
        vocab_size=129280,
        mlp=MlpSpec(width=18432),
        moe=MoeSpec(
            num_experts=256,
            top_k=8,
            width=2048,
            shared_width=2048,
            first_dense_layers=3,
            score="sigmoid",
            routed_scale=2.5,
            num_groups=8,
            top_groups=4,
            group_score="top2_sum",
            aux_loss=0.0001,
            has_balance_bias=True,
            balance_bias_rate=0.001,
        ),
        rope=_deepseek_rope(1.0),
    )


_ALL = [
    # name, layers, width, heads
    _gpt2("gpt2-124m", 12, 768, 12),
    _gpt2("gpt2-355m", 24, 1024, 16),
    _gpt2("gpt2-774m", 36, 1280, 20),
    _gpt2("gpt2-1.5b", 48, 1600, 25),
    # The GPT-3 paper prints 24 heads of 128 for 1.3B and a width of 5140 for 13B, which are not
    # consistent; these are the consistent shapes that others train under the same names.
    _gpt3("gpt3-125m", 12, 768, 12),
    _gpt3("gpt3-350m", 24, 1024, 16),
    _gpt3("gpt3-760m", 24, 1536, 16),
    _gpt3("gpt3-1.3b", 24, 2048, 16),
    _gpt3("gpt3-2.7b", 32, 2560, 32),
    _gpt3("gpt3-6.7b", 32, 4096, 32),
    _gpt3("gpt3-13b", 40, 5120, 40),
    _gpt3("gpt3-175b", 96, 12288, 96),
    _megatron("megatron-1.7b", 24, 2304, 24),
    _megatron("megatron-3.6b", 30, 3072, 32),
    _megatron("megatron-7.5b", 36, 4096, 32),
    _megatron("megatron-18b", 40, 6144, 48),
    _megatron("megatron-39b", 48, 8192, 64),
    _megatron("megatron-76b", 60, 10240, 80),
    _megatron("megatron-145b", 80, 12288, 96),
    _megatron("megatron-310b", 96, 16384, 128),
    _megatron("megatron-530b", 105, 20480, 128),
    _megatron("megatron-1t", 128, 25600, 160),
    # name, layers, width, (query heads, key/value heads), MLP width
    _llama2("llama-2-7b", 32, 4096, (32, 32), 11008),
    _llama2("llama-2-13b", 40, 5120, (40, 40), 13824),
    _llama2("llama-2-70b", 80, 8192, (64, 8), 28672),
    _llama3("llama-3.1-8b", 32, 4096, (32, 8), 14336),
    _llama3("llama-3.1-70b", 80, 8192, (64, 8), 28672),
    _llama3("llama-3.1-405b", 126, 16384, (128, 8), 53248),
    _llama3("llama-3.2-1b", 16, 2048, (32, 8), 8192, factor=32, tied_head=True),
    _llama3("llama-3.2-3b", 28, 3072, (24, 8), 8192, factor=32, tied_head=True),
    _qwen25("qwen2.5-0.5b", 24, 896, (14, 2), 4864, small=True),
    _qwen25("qwen2.5-1.5b", 28, 1536, (12, 2), 8960, small=True),
    _qwen25("qwen2.5-3b", 36, 2048, (16, 2), 11008, small=True),
    _qwen25("qwen2.5-7b", 28, 3584, (28, 4), 18944),
    _qwen25("qwen2.5-14b", 48, 5120, (40, 8), 13824),
    _qwen25("qwen2.5-32b", 64, 5120, (40, 8), 27648),
    _qwen25("qwen2.5-72b", 80, 8192, (64, 8), 29568),
    _qwen3("qwen3-0.6b", 28, 1024, (16, 8), 3072, tied_head=True),
    _qwen3("qwen3-1.7b", 28, 2048, (16, 8), 6144, tied_head=True),
    _qwen3("qwen3-4b", 36, 2560, (32, 8), 9728, tied_head=True),
    _qwen3("qwen3-8b", 36, 4096, (32, 8), 12288),
    _qwen3("qwen3-14b", 40, 5120, (40, 8), 17408),
    _qwen3("qwen3-32b", 64, 5120, (64, 8), 25600),
    _qwen3(
        "qwen3-30b-a3b",
        48,
        2048,
        (32, 4),
        6144,
        moe=MoeSpec(num_experts=128, top_k=8, width=768, aux_loss=0.001),
    ),
    _mistral(),
    _mixtral("mixtral-8x7b", 32, 4096, (32, 8), 14336, 32768),
    _mixtral("mixtral-8x22b", 56, 6144, (48, 8), 16384, 65536),
    _deepseek_v2_lite(),
    _deepseek_v3(),
]
FAMILIES: dict[str, ModelSpec] = {model.family: model for model in _ALL}
