"""Hugging Face hub ids of the families: `meta-llama/Llama-3.1-8B` is `llama-3.1-8b`.

An id is listed when its config has the architecture of the family, as fine-tuned versions of a model do.
"""

import re
from collections.abc import Iterator

_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
_PREFIXES = ("https://huggingface.co/", "hf://", "huggingface.co/")
# The hub's prefix, our prefix, the sizes and the endings of one series of models.
_SERIES = (
    ("meta-llama/Llama-2-", "llama-2-", ("7b", "13b", "70b"), ("", "-hf", "-chat", "-chat-hf")),
    ("meta-llama/Llama-3.1-", "llama-3.1-", ("8B", "70B", "405B"), ("", "-Instruct")),
    ("meta-llama/Meta-Llama-3.1-", "llama-3.1-", ("8B", "70B", "405B"), ("", "-Instruct")),
    ("meta-llama/Llama-3.2-", "llama-3.2-", ("1B", "3B"), ("", "-Instruct")),
    (
        "Qwen/Qwen2.5-",
        "qwen2.5-",
        ("0.5B", "1.5B", "3B", "7B", "14B", "32B", "72B"),
        ("", "-Instruct"),
    ),
    ("Qwen/Qwen3-", "qwen3-", ("0.6B", "1.7B", "4B", "8B", "14B", "32B", "30B-A3B"), ("", "-Base")),
)
_OTHERS = {
    "openai-community/gpt2": "gpt2-124m",
    "openai-community/gpt2-medium": "gpt2-355m",
    "openai-community/gpt2-large": "gpt2-774m",
    "openai-community/gpt2-xl": "gpt2-1.5b",
    "meta-llama/Llama-3.3-70B-Instruct": "llama-3.1-70b",
    "mistralai/Mistral-7B-v0.1": "mistral-7b",
    "mistralai/Mistral-7B-Instruct-v0.1": "mistral-7b",
    "mistralai/Mixtral-8x7B-v0.1": "mixtral-8x7b",
    "mistralai/Mixtral-8x7B-Instruct-v0.1": "mixtral-8x7b",
    "mistralai/Mixtral-8x22B-v0.1": "mixtral-8x22b",
    "deepseek-ai/DeepSeek-V2-Lite": "deepseek-v2-lite",
    "deepseek-ai/DeepSeek-V2-Lite-Chat": "deepseek-v2-lite",
    "deepseek-ai/DeepSeek-V3-Base": "deepseek-v3",
    "deepseek-ai/DeepSeek-V3": "deepseek-v3",
    "deepseek-ai/DeepSeek-V3-0324": "deepseek-v3",
    "deepseek-ai/DeepSeek-R1": "deepseek-v3",
}


def _ids() -> Iterator[tuple[str, str]]:
    """Every known hub id with the name of its family."""
    for hub, ours, sizes, endings in _SERIES:
        for size in sizes:
            for ending in endings:
                yield f"{hub}{size}{ending}", f"{ours}{size.lower()}"
    yield from _OTHERS.items()


HUB_IDS: dict[str, str] = dict(_ids())
"""Family name by hub id, as the hub spells it."""
_BY_LOWER = {hub_id.lower(): family for hub_id, family in HUB_IDS.items()}


def hub_id_of(text: str) -> str | None:
    """The hub id in a text such as `hf://Qwen/Qwen3-8B`; None for a text that has not the form of one."""
    bare = text.strip()
    for prefix in _PREFIXES:
        bare = bare.removeprefix(prefix)
    bare = bare.rstrip("/") if bare != text.strip() else bare
    return bare if _HUB_ID.match(bare) else None


def family_of_hub_id(text: str) -> str | None:
    """The family that a hub id names, in any case; None where it is not known."""
    hub_id = hub_id_of(text)
    return None if hub_id is None else _BY_LOWER.get(hub_id.lower())
