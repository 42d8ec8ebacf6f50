"""Why vLLM would not open a peft folder, by the rules of its loader (vllm/lora, August 2026).

vLLM reads r, lora_alpha and use_rslora of the config, and takes the modules from the names of the tensors. It
has neither magnitudes (DoRA) nor tables and rows beside adapters, and packs the three projections of routed
experts, which must all be there.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

DEFAULT_MAX_RANK, LARGEST_RANK = 16, 512
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
_EXPERT = re.compile(r"\.experts\.0\.(\w+)\.lora_A\.weight$")
_NUM_EXPERT_PROJECTIONS = 3


def vllm_obstacles(config: Mapping[str, Any], keys: Iterable[str]) -> list[str]:
    """The reasons why vLLM refuses a folder with this config and these tensors; none where it opens it."""
    keys = list(keys)
    rank, projections = config["r"], {found[1] for key in keys if (found := _EXPERT.search(key))}
    reasons = {
        "it has magnitudes (DoRA)": bool(config.get("use_dora")),
        "modules are trained in full (modules_to_save)": bool(config.get("modules_to_save")),
        "rows of single tokens are trained (trainable_token_indices)": bool(
            config.get("trainable_token_indices")
        ),
        f"its rank is {rank}, and {LARGEST_RANK} is the largest": rank > LARGEST_RANK,
        f"routed experts have adapters on {' and '.join(sorted(projections))} only": 0
        < len(projections)
        < _NUM_EXPERT_PROJECTIONS,
    }
    return [reason for reason, holds in reasons.items() if holds]


def vllm_note(config: Mapping[str, Any], keys: Iterable[str]) -> str | None:
    """What to do so that vLLM serves a folder, to print; None where its defaults open it."""
    keys = list(keys)
    reasons = vllm_obstacles(config, keys)
    if reasons:
        return (
            f"vLLM does not open this folder: {'; '.join(reasons)}. Merge instead: convert without --to peft"
        )
    notes: list[str] = []
    if config["r"] > DEFAULT_MAX_RANK:
        wanted = next(one for one in _RANKS if one >= config["r"])
        notes.append(f"vLLM needs --max-lora-rank {wanted} for this folder, whose rank is {config['r']}")
    if any("lora_embedding_A" in key or "lm_head.lora_A" in key for key in keys):
        notes.append("vLLM opens adapters on embedding and head for some families only; else merge")
    return ". ".join(notes) or None
