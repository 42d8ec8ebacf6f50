"""Keys of run files of version 1 that have other names since version 2. Old names are refused, never read."""

from collections.abc import Mapping
from typing import Any, cast

RENAMED_KEYS = {
    "parallel.reduce": "parallel.grad_reduce",
    "precision.fp8.bf16_ends": "precision.fp8.bf16_layers_each_end",
    "precision.fp8.shadow_every": "precision.fp8.compare_every_steps",
    "precision.fp8.shadow_min_cosine": "precision.fp8.min_gradient_cosine",
    "memory.regather": "memory.regather_tp_inputs",
    "optim.trust": "optim.trust_coefficient",
    "optim.decay": "optim.weight_decay_on",
    "schedule.final_ratio": "schedule.min_lr_ratio",
    "data.ramp": "data.batch_ramp",
}
"""Old dotted key -> new dotted key."""

RENAMED_VALUES = {
    ("parallel.reduce", "each"): "each_microbatch",
    ("parallel.reduce", "last"): "last_microbatch",
    ("precision.fp8", "blocks"): "blockwise",
    ("precision.fp8.recipe", "blocks"): "blockwise",
}
"""(old dotted key, old value) -> new value."""


def renamed_in(tree: Mapping[str, Any]) -> list[str]:
    """`parallel.reduce: last is now parallel.grad_reduce: last_microbatch`, for each renamed key or value."""
    found: list[str] = []
    for key in sorted({*RENAMED_KEYS, *(key for key, _ in RENAMED_VALUES)}):
        is_there, value = _value_at(tree, key)
        new_key = RENAMED_KEYS.get(key, key)
        new_value = RENAMED_VALUES.get((key, value)) if isinstance(value, str) else None
        if is_there and new_value is not None:
            found.append(f"{key}: {value} is now {new_key}: {new_value}")
        elif is_there and new_key != key:
            found.append(f"{key} is now {new_key}")
    return found


def new_name(dotted: str) -> str | None:
    """The new name of a renamed key, by its dotted name or, where it is unique, by its last part."""
    if dotted in RENAMED_KEYS:
        return RENAMED_KEYS[dotted]
    found = [new for old, new in RENAMED_KEYS.items() if old.rpartition(".")[2] == dotted]
    return found[0] if len(found) == 1 else None


def _value_at(tree: Mapping[str, Any], dotted: str) -> tuple[bool, Any]:
    """Whether a key is in a tree of plain values, and its value."""
    value: Any = tree
    for part in dotted.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return False, None
        value = cast(Mapping[str, Any], value)[part]
    return True, value
