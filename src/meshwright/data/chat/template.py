"""The chat template of a tokenizer: Jinja text that turns messages into the text a model was trained on.

Templates come from other people, so they run in Jinja's immutable sandbox. `{% generation %}` blocks, which
some templates put around the answers of the model, are found by two marker characters around their output.
"""

import datetime
import functools
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from meshwright.data.chat.values import TAG_MARKS, Messages, notations
from meshwright.errors import DataError, read_trouble
from meshwright.files import MIB, read_json_file, read_text

TEMPLATE_FILE, CONFIG_FILE, TOKENS_MAP_FILE = (
    "chat_template.jinja",
    "tokenizer_config.json",
    "special_tokens_map.json",
)
MORE_TEMPLATES = "additional_chat_templates"
DEFAULT, WITH_TOOLS = "default", "tool_use"
_BEGIN, _END = TAG_MARKS
_TOKEN_NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


class Rendered(NamedTuple):
    """The text of a conversation."""

    text: str
    spans: list[tuple[int, int]]
    """First character and end of each `{% generation %}` block."""


@dataclass(frozen=True)
class ChatTemplate:
    """Templates by name, and everything they may read besides the messages."""

    texts: Mapping[str, str]
    where: str
    """The file that they were read from."""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, Any] = field(default_factory=dict)
    date: datetime.date = datetime.date(2000, 1, 1)
    """What `strftime_now` returns: data must not depend on the day on which it was packed."""

    def text(self, *, with_tools: bool = False) -> str:
        """The template for conversations with or without tools."""
        name = WITH_TOOLS if with_tools and WITH_TOOLS in self.texts else DEFAULT
        return self.texts.get(name) or next(iter(self.texts.values()))

    @property
    def hash(self) -> str:
        """Sixteen hex digits of a hash of the templates."""
        content = json.dumps(dict(sorted(self.texts.items())))
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    @property
    def reads_date(self) -> bool:
        """Whether a template asks for the date of today."""
        return any("strftime_now" in text for text in self.texts.values())

    def names(self, field: str) -> bool:
        """Whether a template names this field of messages or records."""
        word = re.compile(rf"\b{field}\b")
        return any(word.search(text) for text in self.texts.values())

    def unread(self, names: Iterable[str]) -> list[str]:
        """Those of these variables that no template reads."""
        return [name for name in names if name not in self._read]

    def unnamed_tokens(self) -> list[str]:
        """Special tokens that a template reads and the tokenizer does not name: Jinja writes none of them."""
        unset = self._read - self.special_tokens.keys() - self.variables.keys()
        return [name for name in (f"{each}_token" for each in _TOKEN_NAMES) if name in unset]

    @property
    def _read(self) -> set[str]:
        return {name for text in self.texts.values() for name in _variables(text)}

    def is_tagged(self, *, with_tools: bool = False) -> bool:
        """Whether the template marks the answers of the model with `{% generation %}`."""
        return _has_blocks(self.text(with_tools=with_tools))

    def render(
        self,
        messages: Messages,
        *,
        tools: Sequence[Any] | None,
        where: str,
        add_generation_prompt: bool = False,
    ) -> Rendered:
        """The text of messages; DataError where the template raises."""
        text = self.text(with_tools=tools is not None)
        template = _compiled(text, self.where, self.date)
        try:
            rendered = template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **{**self.special_tokens, **self.variables},
            )
        except Exception as error:  # a template is a program: it raises anything
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            hint = "change the record, or pass another template with --template"
            raise DataError(
                f"the chat template refuses the messages: {reason}", where=where, hint=hint
            ) from error
        return _without_markers(rendered)

    def first_rendering(
        self, messages: Messages, *, tools: Sequence[Any] | None, where: str
    ) -> tuple[Messages, Rendered]:
        """The messages in the first notation that the template takes, and their text."""
        refused: DataError | None = None
        for each in notations(messages):
            try:
                return each, self.render(each, tools=tools, where=where)
            except DataError as error:
                refused = refused or error
        assert refused is not None
        raise refused


def open_template(
    folder: Path,
    *,
    file: Path | None = None,
    variables: Mapping[str, Any] | None = None,
    date: datetime.date,
) -> ChatTemplate | None:
    """The chat template in a tokenizer's folder, or in `file`; None where there is none."""
    config = _json_object(folder / CONFIG_FILE)
    if file is not None:
        texts, where = {DEFAULT: _read_template(file)}, str(file)
    else:
        texts, where = _templates_in(folder, config)
    if not texts:
        return None
    for text in texts.values():
        _compiled(text, where, date)
    return ChatTemplate(texts, where, _special_tokens(folder, config), variables or {}, date)


def _templates_in(folder: Path, config: Mapping[str, Any]) -> tuple[dict[str, str], str]:
    files = {DEFAULT: folder / TEMPLATE_FILE} | {
        each.stem: each for each in sorted((folder / MORE_TEMPLATES).glob("*.jinja"))
    }
    found = {name: _read_template(each) for name, each in files.items() if each.is_file()}
    if found:
        return found, str(folder / TEMPLATE_FILE)
    value = config.get("chat_template")
    if isinstance(value, list):
        value = {each.get("name"): each.get("template") for each in value if isinstance(each, dict)}
    texts = value if isinstance(value, dict) else {DEFAULT: value}
    where = str(folder / CONFIG_FILE)
    return {str(name): text for name, text in texts.items() if isinstance(text, str) and text}, where


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by the names that templates use: bos_token, eos_token, ..."""
    both = {**_json_object(folder / TOKENS_MAP_FILE), **config}
    found: dict[str, str] = {}
    for name in (f"{each}_token" for each in _TOKEN_NAMES):
        value = both.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            found[name] = value
    return found


def _json_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = read_json_file(path, max_bytes=64 * MIB)
    except (OSError, ValueError) as error:
        raise DataError(f"the file cannot be read: {read_trouble(error)}", where=str(path)) from error
    return value if isinstance(value, dict) else {}


def _read_template(path: Path) -> str:
    try:
        return read_text(path)
    except (OSError, ValueError) as error:
        fact = f"the chat template cannot be read: {read_trouble(error)}"
        raise DataError(fact, where=str(path), hint="--template takes a Jinja file") from error


def _variables(text: str) -> set[str]:
    """Names that a template reads and does not set."""
    return meta.find_undeclared_variables(_environment().parse(text))


@functools.lru_cache(maxsize=16)
def _has_blocks(text: str) -> bool:
    """Whether a template has `{% generation %}` blocks, not only their name in a comment."""
    return _environment().parse(text).find(nodes.ExtensionAttribute) is not None


def _environment() -> ImmutableSandboxedEnvironment:
    return ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )


@functools.lru_cache(maxsize=16)
def _compiled(text: str, where: str, date: datetime.date) -> Any:
    environment = _environment()
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = date.strftime
    try:
        return environment.from_string(text)
    except TemplateSyntaxError as error:
        fact = f"the chat template is no valid Jinja: {error.message} (line {error.lineno})"
        raise DataError(fact, where=where, hint="correct it, or pass another with --template") from error


class _Generation(Extension):
    """The block `{% generation %} ... {% endgeneration %}`: its output between two marker characters."""

    tags = {"generation"}  # noqa: RUF012  the name and type that Jinja asks for

    def parse(self, parser: Parser) -> nodes.Node:
        """The block as a call with its body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Any) -> str:
        return f"{_BEGIN}{caller()}{_END}"


def _without_markers(rendered: str) -> Rendered:
    """The text, and where the markers stood in it."""
    if _BEGIN not in rendered:
        return Rendered(rendered, [])
    parts: list[str] = []
    spans: list[tuple[int, int]] = []
    begin, length = 0, 0
    for part in re.split(f"([{_BEGIN}{_END}])", rendered):
        if part == _BEGIN:
            begin = length
        elif part == _END:
            spans.append((begin, length))
        else:
            parts.append(part)
            length += len(part)
    return Rendered("".join(parts), spans)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002  called by templates
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    """JSON without the HTML escapes of Jinja's own filter, as every chat template expects."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise TemplateError(message)
