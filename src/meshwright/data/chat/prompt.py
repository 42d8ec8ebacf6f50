"""What a model is asked: the tokens of a prompt, and the tokens that end the answer."""

import datetime
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from meshwright.data.chat.template import ChatTemplate, open_template
from meshwright.data.sources import MANIFEST_FILE, ChatFacts, read_manifest
from meshwright.data.tokenize import HuggingFaceTokenizer, Tokenizer
from meshwright.errors import DataError
from meshwright.files import MIB, read_json_file
from meshwright.spec import DataSpec

_GENERATION_FILE = "generation_config.json"
_WHERE = "--chat"


class Prompt(NamedTuple):
    """A prompt for `sample`."""

    tokens: list[int]
    stop_ids: frozenset[int]
    """Tokens that end the answer."""


def text_prompt(tokenizer: Tokenizer, text: str) -> Prompt:
    """Text that the model continues up to the end of the document."""
    [tokens] = tokenizer.encode([text])
    if not len(tokens):
        raise DataError("the prompt has no tokens", where="--prompt", hint='such as --prompt "It was"')
    return Prompt(tokens.tolist(), frozenset([tokenizer.eos_id]))


def chat_prompt(tokenizer: Tokenizer, question: str, data: DataSpec | None) -> Prompt:
    """A turn of the user, rendered as in training; the answer ends with the end-of-turn token.

    The template is that of the run's dataset. Without a dataset it is the one beside the tokenizer.
    """
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        hint = "pass the folder of the chat model: --tokenizer path/to/model"
        raise DataError("the byte tokenizer has no special tokens for turns", where=_WHERE, hint=hint)
    template, ends = _dataset_template(data) if data is not None else _model_template(tokenizer)
    messages = [{"role": "user", "content": question}]
    rendered = template.render(messages, tools=None, where="--prompt", add_generation_prompt=True)
    [tokens] = tokenizer.encode([rendered.text])
    return Prompt(tokens.tolist(), frozenset([tokenizer.eos_id, *tokenizer.ids_of(ends)]))


def _dataset_template(data: DataSpec) -> tuple[ChatTemplate, Iterable[str | int]]:
    """The template of the first packed dataset of a run, with the date and variables of its packing."""
    folder, chat = chats_of(data)
    if folder is None or chat is None or chat.template_hash is None:
        hint = "leave --chat out, or take the template of a model: --tokenizer path/to/model"
        raise DataError("the run's data have no chat template", where=str(folder or _WHERE), hint=hint)
    date = datetime.date.fromisoformat(chat.date) if chat.date else datetime.date.today()
    template = open_template(folder, variables=chat.variables, date=date)
    assert template is not None
    return replace(template, special_tokens=chat.special_tokens), chat.end_tokens


def was_trained_on_chats(data: DataSpec) -> bool:
    """Whether the dataset of a run was rendered with a chat template."""
    chat = chats_of(data)[1]
    return chat is not None and chat.template_hash is not None


def chats_of(data: DataSpec) -> tuple[Path | None, ChatFacts | None]:
    """The first packed dataset of a run, and how its chats were rendered."""
    folders = [Path(source.path) for source in data.sources if source.path is not None]
    folder = next((each for each in folders if (each / MANIFEST_FILE).is_file()), None)
    return folder, None if folder is None else read_manifest(folder).chat


def _model_template(tokenizer: HuggingFaceTokenizer) -> tuple[ChatTemplate, Iterable[str | int]]:
    folder = tokenizer.path.parent
    template = open_template(folder, date=datetime.date.today())
    if template is None:
        hint = "leave --chat out, or take the folder of the chat model: --tokenizer path/to/model"
        raise DataError("the tokenizer has no chat template", where=str(folder), hint=hint)
    return template, _generation_ends(folder)


def _generation_ends(folder: Path) -> list[int]:
    """The tokens at which a Hugging Face model stops; a chat model often has several."""
    try:
        config = read_json_file(folder / _GENERATION_FILE, max_bytes=16 * MIB)
    except (OSError, ValueError):
        return []
    ends = config.get("eos_token_id") if isinstance(config, dict) else None
    return [each for each in (ends if isinstance(ends, list) else [ends]) if isinstance(each, int)]
