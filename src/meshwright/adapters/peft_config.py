"""Reads `adapter_config.json` of a peft folder, and refuses kinds of LoRA that compute something else here.

peft has more kinds of LoRA than this program: some compute another function of the same tensors, and some
change the base weights before they attach adapters, which the folder then does not have.
"""

import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.errors import CheckpointError
from meshwright.files import MIB, read_json_file
from meshwright.spec import AdapterSpec

CONFIG_FILE = "adapter_config.json"
_MAX_CONFIG_BYTES = 16 * MIB
MERGE = "merge it into its base with peft, and start from the merged model"
_OTHER_FUNCTIONS = (
    "lora_bias",
    "alora_invocation_tokens",
    "layer_replication",
    "use_qalora",
    "use_bdlora",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
)
"""Keys of peft 0.21 that change what adapters compute, or what they are added to."""
_CHANGED_BASES = ("pissa", "corda", "olora", "loftq", "lora_ga")
"""Values of init_lora_weights with which peft subtracts the initial adapters from the base weights."""


@dataclass(frozen=True)
class PeftConfig:
    """What a config says about the tensors beside it."""

    rank: float
    rank_by_pattern: dict[str, float]
    alpha: float
    alpha_by_pattern: dict[str, float]
    is_rslora: bool
    is_dora: bool
    modules: tuple[str, ...]
    """Ends of names of the modules that are trained in full."""
    ties_weights: bool
    """Whether a tied head follows an embedding that is trained in full."""
    tokens: dict[str, list[int]]
    """Module -> ids of the tokens whose rows are trained; "" is the embedding, under any name."""
    version: tuple[int, ...] = ()
    """Major, minor and patch of the peft that saved it; empty where it does not say."""

    def scale(self, module: str, rank: int) -> float:
        """The factor on B A x of a module."""
        alpha = _of_module(module, self.alpha_by_pattern, self.alpha)
        return alpha / (math.sqrt(rank) if self.is_rslora else rank)

    def rank_of(self, module: str) -> float:
        """The rank that peft gives to a module, whose tensors must have it."""
        return _of_module(module, self.rank_by_pattern, self.rank)

    def token_ids(self, module: str, *, is_embedding: bool) -> list[int]:
        """The ids of a table's trained rows, in their order in the file; none where no row is trained."""
        named = (ids for key, ids in self.tokens.items() if key and ends_with(module, key))
        return next(named, self.tokens.get("", []) if is_embedding else [])


def _of_module(module: str, by_pattern: dict[str, float], usual: float) -> float:
    """The value of a module: by peft's rule that of the first pattern that ends its name."""
    found = (value for key, value in by_pattern.items() if re.match(rf"(.*\.)?({key})$", module))
    return next(found, usual)


def ends_with(module: str, name: str) -> bool:
    """Whether a name in a config names a module: it is the end of the module's name."""
    return module == name or module.endswith(f".{name}")


def read_peft_config(folder: Path) -> PeftConfig:
    """The config of a folder; raises CheckpointError for damage, and for kinds that are not LoRA as here."""
    path = folder / CONFIG_FILE
    try:
        config = read_json_file(path, max_bytes=_MAX_CONFIG_BYTES)
        if not isinstance(config, dict):
            raise ValueError("it is no mapping")
        _refuse_other_kinds(config, path)
        return PeftConfig(
            rank=_number(config, "r", config.get("r")),
            rank_by_pattern=_patterns(config, "rank_pattern"),
            alpha=_number(config, "lora_alpha", config.get("lora_alpha")),
            alpha_by_pattern=_patterns(config, "alpha_pattern"),
            is_rslora=_flag(config, "use_rslora"),
            is_dora=_flag(config, "use_dora"),
            modules=_texts(config, "modules_to_save"),
            ties_weights=_flag(config, "ensure_weight_tying"),
            tokens=_tokens(config),
            version=_version(config.get("peft_version")),
        )
    except FileNotFoundError:
        hint = "copy it from where the adapter was saved: it has the scale of the tensors beside it"
        raise CheckpointError("there is no such file", where=str(path), hint=hint) from None
    except OSError as error:
        fact = f"the file cannot be read: {error.strerror or error}"
        raise CheckpointError(fact, where=str(path), hint="check its permissions") from None
    except ValueError as error:
        raise CheckpointError(f"damaged: {error}", where=str(path), hint="save the adapter again") from None


def require_same_kind(config: PeftConfig, adapter: AdapterSpec, folder: Path) -> None:
    """Refuse a folder with magnitudes for a run without them, and the other way round."""
    if config.is_dora != (adapter.kind == "dora"):
        there = "dora" if config.is_dora else "lora"
        place, hint = str(folder / CONFIG_FILE), f"use adapter.kind={there}"
        raise CheckpointError(f"the adapter is of kind {there}", where=place, hint=hint)


def _refuse_other_kinds(config: dict[str, Any], path: Path) -> None:
    for key, usual in (("peft_type", "LORA"), ("bias", "none")):
        if config.get(key, usual) != usual:
            raise CheckpointError(f"{key} is {config[key]!r}", where=str(path), hint=MERGE)
    for key in _OTHER_FUNCTIONS:
        if config.get(key):
            fact = f"{key} is set, and adapters here compute another function"
            raise CheckpointError(fact, where=str(path), hint=MERGE)
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGED_BASES):
        raise CheckpointError(
            f"init_lora_weights is {start!r}: peft changed the base before it trained these adapters",
            where=str(path),
            hint=f"{MERGE}, or save it with path_initial_model_for_weight_conversion",
        )


def _number(config: dict[str, Any], key: str, value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) <= sys.float_info.max:
        raise ValueError(f"{key} is {_shown(value)}, no number" if key in config else f"it has no {key}")
    return float(value)


def _flag(config: dict[str, Any], key: str) -> bool:
    value = config.get(key)
    if value not in (None, True, False):
        raise ValueError(f"{key} is {_shown(value)}, neither true nor false")
    return bool(value)


def _patterns(config: dict[str, Any], name: str) -> dict[str, float]:
    patterns = config.get(name) or {}
    if not isinstance(patterns, dict):
        raise ValueError(f"{name} is {_shown(patterns)}, no mapping")
    for key in patterns:
        try:
            re.compile(key)
        except re.error as error:
            raise ValueError(f"{name} has {key!r}, no regular expression: {error}") from None
    return {key: _number(config, name, value) for key, value in patterns.items()}


def _texts(config: dict[str, Any], key: str) -> tuple[str, ...]:
    value = config.get(key) or []
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ValueError(f"{key} is {_shown(value)}, no list of names")
    return tuple(value)


def _tokens(config: dict[str, Any]) -> dict[str, list[int]]:
    value = config.get("trainable_token_indices") or {}
    by_module = value if isinstance(value, dict) else {"": value}
    for ids in by_module.values():
        if not isinstance(ids, list) or not all(type(one) is int for one in ids):
            raise ValueError(f"trainable_token_indices has {_shown(ids)}, no list of ids")
    return by_module


def _version(value: Any) -> tuple[int, ...]:
    found = re.match(r"(\d{1,6})\.(\d{1,6})\.(\d{1,6})", value) if isinstance(value, str) else None
    return tuple(map(int, found.groups())) if found else ()


def _shown(value: Any) -> str:
    """A value in a message, cut where it is long."""
    return repr(value)[:40]
