"""What an exported folder needs so that a server asks the model as it was trained: template and end of turn.

A base model often has no chat template, and its generation config stops at the end of a document alone. The
dataset of the run knows the template that rendered its chats and the token that ends an answer.
"""

import json
from typing import Any

from meshwright.checkpoint.source_files import CHAT_TEMPLATE, GENERATION, TOKENIZER_CONFIG
from meshwright.data.chat.prompt import chats_of
from meshwright.data.chat.template import DEFAULT
from meshwright.data.sources import ChatFacts
from meshwright.data.tokenize import HuggingFaceTokenizer
from meshwright.spec import DataSpec


def chat_files(
    data: DataSpec, tokenizer: HuggingFaceTokenizer, files: dict[str, bytes], eos: Any
) -> dict[str, bytes]:
    """The files that differ where the dataset was rendered with a chat template; empty where none do.

    `files` is the folder without them, `eos` what its config.json stops at.
    """
    folder, chat = chats_of(data)
    if folder is None or chat is None or chat.template_hash is None:
        return {}
    text = (folder / CHAT_TEMPLATE).read_bytes()
    settings = _settings(files.get(TOKENIZER_CONFIG))
    changed = {} if _template(files, settings) == text else _with_template(text, settings, chat)
    generation = _settings(files.get(GENERATION))
    stops = generation.get("eos_token_id", eos)
    stops = stops if isinstance(stops, list) else [] if stops is None else [stops]
    missing = [token for token in tokenizer.ids_of(chat.end_tokens) if token not in stops]
    if missing:
        changed[GENERATION] = _dump({**generation, "eos_token_id": [*stops, *missing]})
    return changed


def _with_template(text: bytes, settings: dict[str, Any], chat: ChatFacts) -> dict[str, bytes]:
    """The template in its own file, and nowhere else; the special tokens that it reads."""
    others = {key: value for key, value in settings.items() if key != "chat_template"}
    return {CHAT_TEMPLATE: text, TOKENIZER_CONFIG: _dump({**chat.special_tokens, **others})}


def _template(files: dict[str, bytes], settings: dict[str, Any]) -> bytes | None:
    """The chat template of a folder, from either place; None without one."""
    if CHAT_TEMPLATE in files:
        return files[CHAT_TEMPLATE]
    value = settings.get("chat_template")
    if isinstance(value, list):
        named = {each.get("name"): each.get("template") for each in value if isinstance(each, dict)}
        value = named.get(DEFAULT)
    return value.encode() if isinstance(value, str) else None


def _settings(content: bytes | None) -> dict[str, Any]:
    try:
        found = json.loads(content or b"{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _dump(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()
