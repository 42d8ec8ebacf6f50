"""FLOPs per token by every convention that published figures use, and the durations they give."""

from collections.abc import Callable

from meshwright.plan.workload.flops import attention_flops_per_token, flops_per_token
from meshwright.spec.model import ModelSpec
from meshwright.spec.parameters import num_matmul_parameters

SECONDS_PER_DAY = 86400.0


def strict(model: ModelSpec, sequence_length: int) -> float:
    """Our convention: 6 per matmul parameter, the causal half of attention once, recompute never."""
    return flops_per_token(model, sequence_length)


def noncausal(model: ModelSpec, sequence_length: int) -> float:
    """The strict convention, with attention counted as if every query saw every key."""
    attention = model.attention
    pair_width = attention.num_heads * (attention.head_width + attention.value_width)
    return 6.0 * num_matmul_parameters(model) + 6.0 * model.num_layers * pair_width * sequence_length


def hardware_four_passes(model: ModelSpec, sequence_length: int) -> float:
    """96 B s l h^2 (1 + s/(6h) + V/(16 l h)) per token: GPT, with the recomputed forward pass counted."""
    layers, width = model.num_layers, model.width
    rest = sequence_length / (6.0 * width) + model.vocab_size / (16.0 * layers * width)
    return 96.0 * layers * width**2 * (1.0 + rest)


def three_passes(model: ModelSpec, sequence_length: int) -> float:
    """72 B s l h^2 (1 + s/(6h) + V/(12 l h)) per token: GPT, without recompute."""
    layers, width = model.num_layers, model.width
    rest = sequence_length / (6.0 * width) + model.vocab_size / (12.0 * layers * width)
    return 72.0 * layers * width**2 * (1.0 + rest)


def lora(model: ModelSpec, sequence_length: int) -> float:
    """LoRA: 4 per matmul parameter, as frozen weights have no weight gradient; attention in full."""
    matmuls = 4.0 * num_matmul_parameters(model)
    return matmuls + attention_flops_per_token(model, sequence_length)


CONVENTIONS: dict[str, Callable[[ModelSpec, int], float]] = {
    "strict": strict,
    "causal": strict,
    "noncausal": noncausal,
    "hw4x": hardware_four_passes,
    "model72": three_passes,
    "lora": lora,
}


def training_days(
    num_parameters: float,
    num_tokens: float,
    num_devices: int,
    *,
    flops_per_second: float,
    passes: float = 8.0,
) -> float:
    """Days of training: passes x tokens x parameters / (devices x achieved FLOP/s).

    `passes` is 8 FLOPs per token and parameter with full recompute, 6 without.
    """
    return passes * num_tokens * num_parameters / (num_devices * flops_per_second) / SECONDS_PER_DAY
