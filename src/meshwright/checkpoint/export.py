"""The files of an exported Hugging Face folder beside its weights.

They are those that came in with the weights. Where none came in, config.json follows from the model, and the
tokenizer and the end-of-document token are those of the run's dataset.
"""

import json
from typing import Any, TypeGuard

import torch

from meshwright.checkpoint.exported_chat import chat_files
from meshwright.checkpoint.locate import CONFIG
from meshwright.checkpoint.source_files import (
    GENERATION,
    TOKENIZER_CONFIG,
    TOKENIZER_FILES,
    read_source_files,
    source_config,
    source_folder,
)
from meshwright.checkpoint.weights import Weights
from meshwright.data.byte_tokenizer_file import BYTE_EOS_TOKEN, byte_tokenizer_json
from meshwright.data.sources import TOKENIZER_FILE
from meshwright.data.tokenize import HuggingFaceTokenizer, Tokenizer, tokenizer_for
from meshwright.errors import MeshwrightError
from meshwright.spec import ModelSpec
from meshwright.spec.huggingface import computes_same, to_config
from meshwright.spec.huggingface.read import from_config

_DTYPE_KEYS = ("dtype", "torch_dtype")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def source_dtype(weights: Weights) -> torch.dtype | None:
    """The dtype of the Hugging Face folder that a checkpoint came from; None for other weights."""
    config = source_config(source_folder(weights.origin)) if weights.step is not None else None
    names = [config.get(key) for key in _DTYPE_KEYS] if config else []
    return next((_DTYPES[name] for name in names if name in _DTYPES), None)


def exported_files(weights: Weights, dtype: torch.dtype) -> dict[str, bytes]:
    """Name -> content of every file of the exported folder but the weights."""
    source = source_folder(weights.origin)
    files = read_source_files(source) if source is not None else {}
    tokenizer, eos = _dataset_tokenizer(weights), None
    if tokenizer is not None and _has_all_tokens(tokenizer, files):
        files[TOKENIZER_FILE] = tokenizer.content
    elif tokenizer is not None:
        files = {name: files[name] for name in files if name not in (GENERATION, *TOKENIZER_FILES)}
        files |= _tokenizer_files(tokenizer, weights.model)
        eos = tokenizer.eos_id
        files[GENERATION] = _dump({"eos_token_id": eos})
    config = exported_config(weights.model, source_config(source), dtype=dtype, eos=eos)
    if weights.run is not None and isinstance(tokenizer, HuggingFaceTokenizer):
        files |= chat_files(weights.run.data, tokenizer, files, config.get("eos_token_id"))
    return {**files, CONFIG: _dump(config)}


def exported_config(
    model: ModelSpec, source: dict[str, Any] | None, *, dtype: torch.dtype, eos: int | None
) -> dict[str, Any]:
    """The config that came in where it still describes the model, else one that does.

    `eos` is the end-of-document token of the dataset, where its tokenizer is not the one that came in.
    """
    name = str(dtype).removeprefix("torch.")
    ours = to_config(model, dtype=name)
    config = next((one for one in (source or {}, {**(source or {}), **ours}) if _describes(one, model)), ours)
    config |= {key: name for key in _DTYPE_KEYS if key in config}
    if source is None or eos is not None:
        # Explicit nulls: transformers has defaults of its own for a missing id.
        config |= {"bos_token_id": None, "eos_token_id": eos, "pad_token_id": None}
    return config


def _describes(config: dict[str, Any], model: ModelSpec) -> bool:
    try:
        return computes_same(from_config(config, where=CONFIG), model)
    except (MeshwrightError, ValueError, TypeError, KeyError):
        return False


def _dataset_tokenizer(weights: Weights) -> Tokenizer | None:
    """The tokenizer of the run's dataset; None where there is no run, or the dataset is no longer there."""
    if weights.run is None:
        return None
    try:
        return tokenizer_for(weights.run.data)
    except (MeshwrightError, OSError):
        return None


def dataset_note(weights: Weights) -> str | None:
    """What an exported folder lacks because the run's dataset is gone or names no tokenizer, to print."""
    if weights.run is None:
        return None
    try:
        tokenizer_for(weights.run.data)
    except (MeshwrightError, OSError) as error:
        why = f"{error.where}: {error.fact}" if isinstance(error, MeshwrightError) else str(error)
        came_in = source_folder(weights.origin) is not None
        has = "has the tokenizer and chat template that came in" if came_in else "has no tokenizer"
        return f"note: the tokenizer of the run's dataset is not known ({why}), so the folder {has}"
    return None


def _has_all_tokens(tokenizer: Tokenizer, files: dict[str, bytes]) -> TypeGuard[HuggingFaceTokenizer]:
    """Whether the tokenizer is the one that came in, or that one with new tokens: all ids mean the same."""
    content = files.get(TOKENIZER_FILE)
    if content is None or not isinstance(tokenizer, HuggingFaceTokenizer):
        return False
    return tokenizer.has_tokens_of(content)


def _tokenizer_files(tokenizer: Tokenizer, model: ModelSpec) -> dict[str, bytes]:
    """The tokenizer in the form that transformers opens."""
    if isinstance(tokenizer, HuggingFaceTokenizer):
        content, eos = tokenizer.content, tokenizer.token(tokenizer.eos_id)
    else:
        content, eos = byte_tokenizer_json(), BYTE_EOS_TOKEN
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": eos,
        "model_max_length": model.max_positions,
        "clean_up_tokenization_spaces": False,
    }
    return {TOKENIZER_FILE: content, TOKENIZER_CONFIG: _dump(settings)}


def _dump(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()
