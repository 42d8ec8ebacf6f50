"""Opens a peft folder the way vLLM's LoRA loader does (peft_helper, utils, lora_model in vllm/lora).

Its rules, written down from the sources: what it reads of the config, which names of tensors it takes for
which modules, what it refuses, and the scale that it multiplies into B.
"""

import json
import math
from pathlib import Path
from typing import NamedTuple

from safetensors.torch import load_file
from torch import Tensor

ALLOWED_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


class VllmRefuses(Exception):
    """vLLM raises an error for this folder."""


class Factors(NamedTuple):
    """What vLLM adds to a module's output: x A^T B^T."""

    a: Tensor
    scaled_b: Tensor


def open_as_vllm(
    folder: Path, expected_modules: set[str], *, max_rank: int = 16, is_packed_moe: bool = False
) -> dict[str, Factors]:
    """The factors of each module. `expected_modules` are the last parts of the names of vLLM's linears, and
    `experts.<n>.<projection>` for each routed expert."""
    config = json.loads((folder / "adapter_config.json").read_text())
    scale = _scale(config, max_rank)
    parts: dict[str, dict[str, Tensor]] = {}
    for key, tensor in load_file(folder / "adapter_model.safetensors").items():
        if key.endswith((".embed_tokens.base_layer.weight", ".lm_head.base_layer.weight")):
            continue
        module, own = _parse(key)
        _, marker, expert = module.partition(".experts.")
        last = f"experts.{expert}" if marker else module.rpartition(".")[2]
        if last not in expected_modules:
            raise VllmRefuses(f"expected target modules in {sorted(expected_modules)}, received {module}")
        parts.setdefault(module, {})[own] = tensor
    if is_packed_moe:
        _require_packed(parts)
    return {module: Factors(found["A"], scale * found["B"]) for module, found in parts.items()}


def _scale(config: dict, max_rank: int) -> float:
    missing = {"r", "lora_alpha", "target_modules"} - config.keys()
    if missing:
        raise VllmRefuses(f"missing fields {missing}")
    if config.get("modules_to_save"):
        raise VllmRefuses("only supports modules_to_save being None")
    if config.get("use_dora"):
        raise VllmRefuses("does not yet support DoRA")
    if config.get("bias", "none") != "none":
        raise VllmRefuses("adapter bias is not supported")
    if max_rank not in ALLOWED_RANKS or config["r"] > max_rank:
        raise VllmRefuses(f"LoRA rank {config['r']} is greater than max_lora_rank {max_rank}")
    # Neither rank_pattern nor alpha_pattern is read.
    rank = config["r"]
    return config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _parse(key: str) -> tuple[str, str]:
    """(module, A or B); the prefix is removed, and any other ending is an error."""
    name = key.removeprefix("base_model.model.")
    for ending, own in (
        (".lora_A.weight", "A"),
        (".lora_B.weight", "B"),
        (".lora_embedding_A", "A"),
        (".lora_embedding_B", "B"),
    ):
        if name.endswith(ending):
            return name.removesuffix(ending), own
    raise VllmRefuses(f"{key} is unsupported LoRA weight")


def _require_packed(parts: dict[str, dict[str, Tensor]]) -> None:
    """Routed experts are packed: all three projections of each are there."""
    experts = {module.rpartition(".")[0] for module in parts if ".experts." in module}
    for expert in experts:
        if sum(module.startswith(f"{expert}.") for module in parts) != 3:
            raise VllmRefuses(f"{expert} lacks a projection")
