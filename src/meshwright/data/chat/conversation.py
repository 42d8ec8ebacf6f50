"""Chats of every common format as one kind of value: turns with roles, and a loss weight for each turn.

messages            {"messages": [{"role", "content"}, ...], "tools"?}             OpenAI, Hugging Face
sharegpt            {"conversations": [{"from", "value"}, ...], "system"?, "tools"?}
alpaca              {"instruction", "input"?, "output", "system"?, "history"?}
prompt-completion   {"prompt", "completion"}, both texts or both lists of messages
preference          {"prompt"?, "chosen", "rejected"}: texts, messages, or whole conversations
tokens              {"input_ids", "weights"}: tokens and the loss weight of each, such as advantages

A turn may have `"train": false` or `"weight": 0.5`, which is its loss weight. A weight may be negative: the
answer then becomes less probable.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from meshwright.errors import DataError

ChatFormat = Literal["messages", "sharegpt", "alpaca", "prompt-completion", "preference", "tokens"]
ASSISTANT = "assistant"
ROLES = ("system", "developer", "user", ASSISTANT, "tool", "function")
_ROLE_OF = {
    **{role: role for role in ROLES},
    "human": "user",
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "model": ASSISTANT,
    "function_call": ASSISTANT,
    "observation": "tool",
    "function_response": "tool",
}
_FORMATS: tuple[tuple[ChatFormat, tuple[str, ...]], ...] = (
    ("preference", ("chosen", "rejected")),
    ("messages", ("messages",)),
    ("sharegpt", ("conversations",)),
    ("alpaca", ("instruction", "output")),
    ("prompt-completion", ("prompt", "completion")),
    ("tokens", ("input_ids", "weights")),
)
_CONTROLS = ("train", "weight")


@dataclass(frozen=True)
class Turn:
    """One message as the template reads it."""

    message: Mapping[str, Any]
    weight: float | None = None
    """Loss weight that the data gives to this turn; None: the one that `--train` gives."""

    @property
    def role(self) -> str:
        """system, user, assistant or tool."""
        return self.message["role"]

    @property
    def is_answer(self) -> bool:
        """Whether the model writes this turn."""
        return self.role == ASSISTANT


@dataclass(frozen=True)
class Conversation:
    """Turns in order."""

    turns: tuple[Turn, ...]
    tools: Sequence[Any] | None = None

    @property
    def messages(self) -> list[Mapping[str, Any]]:
        """The messages as the template reads them."""
        return [turn.message for turn in self.turns]

    def answers(self) -> list[int]:
        """Indices of the turns that the model writes."""
        return [index for index, turn in enumerate(self.turns) if turn.is_answer]


@dataclass(frozen=True)
class Completion:
    """A text and its continuation, without a template; the end-of-document token follows."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class WeightedTokens:
    """Tokens that another program has made, and the loss weight of each as a target."""

    tokens: tuple[int, ...]
    weights: tuple[float, ...]


Sample = Conversation | Completion | WeightedTokens


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt, of which the first is preferred."""

    chosen: Sample
    rejected: Sample


def format_of(record: Mapping[str, Any], where: str) -> ChatFormat:
    """The format of a record, by its keys."""
    for name, keys in _FORMATS:
        if all(record.get(key) is not None for key in keys):
            return name
    keys = ", ".join(map(repr, list(record)[:8])) or "nothing"
    known = "; ".join(f"{name}: {' and '.join(needed)}" for name, needed in _FORMATS)
    raise DataError(f"the record is no chat: it has {keys}", where=where, hint=f"the formats need {known}")


def read_sample(
    record: Mapping[str, Any], *, chat_format: ChatFormat | None, where: str, texts_are_turns: bool = False
) -> Sample | Pair:
    """A record as turns; DataError with the turn where it is malformed. None: the format is detected."""
    found = format_of(record, where)
    if chat_format not in (None, found):
        _require_keys(record, chat_format, where)
        found = chat_format
    reading = _Reading(record, where, texts_are_turns)
    if found == "tokens":
        return reading.tokens()
    if found == "preference":
        return reading.preference()
    if found == "prompt-completion":
        return reading.completed(record["prompt"], record["completion"], "completion")
    return {"messages": reading.openai, "sharegpt": reading.sharegpt, "alpaca": reading.alpaca}[found]()


def _require_keys(record: Mapping[str, Any], chat_format: ChatFormat, where: str) -> None:
    needed = dict(_FORMATS)[chat_format]
    missing = [key for key in needed if record.get(key) is None]
    if missing:
        fact = f"the record has no {missing[0]!r}, which the format {chat_format} needs"
        raise DataError(fact, where=where, hint=f"the record has {', '.join(map(repr, list(record)[:8]))}")


@dataclass(frozen=True)
class _Reading:
    """One record while it is read."""

    record: Mapping[str, Any]
    where: str
    texts_are_turns: bool

    def openai(self) -> Conversation:
        return self._conversation(self._turns(self.record["messages"]))

    def sharegpt(self) -> Conversation:
        return self._conversation([*self._system(), *self._turns(self.record["conversations"])])

    def alpaca(self) -> Conversation:
        record = self.record
        question = self._text(record["instruction"], "instruction")
        given = record.get("input")
        question = f"{question}\n{self._text(given, 'input')}" if given else question
        turns = [*self._system()]
        for pair in record.get("history") or []:
            if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
                raise self._error("an entry of 'history' is no pair of a question and an answer")
            turns += [_turn("user", self._text(pair[0], "history")), self._answer(pair[1], "history")]
        turns += [_turn("user", question), self._answer(record["output"], "output")]
        return self._conversation(turns)

    def preference(self) -> Pair:
        record = self.record
        chosen, rejected = record["chosen"], record["rejected"]
        prompt = record.get("prompt")
        prompt = record.get("conversations") if prompt is None else prompt
        if prompt is None:
            return self._with_common_prompt(chosen, rejected)
        return Pair(self.completed(prompt, chosen, "chosen"), self.completed(prompt, rejected, "rejected"))

    def completed(self, prompt: Any, answer: Any, key: str) -> Sample:
        """A prompt and its answer; earlier answers, inside the prompt, are not trained."""
        if isinstance(prompt, str) and isinstance(answer, str) and not self.texts_are_turns:
            if not answer.strip():
                raise self._error(f"{key!r} is empty, so there is nothing to train on")
            return Completion(prompt, answer)
        before = [_turn("user", prompt)] if isinstance(prompt, str) else self._turns(prompt)
        before = [replace(turn, weight=0.0) if turn.is_answer else turn for turn in before]
        if isinstance(answer, str):
            after = [self._answer(answer, key)]
        else:
            after = self._turns([answer] if isinstance(answer, Mapping) else answer, first=len(before))
        if not any(turn.is_answer for turn in after):
            raise self._error(f"{key!r} has no turn of the assistant")
        return self._conversation([*self._system(), *before, *after])

    def tokens(self) -> WeightedTokens:
        tokens, weights = self.record["input_ids"], self.record["weights"]
        for name, values, kind in (("input_ids", tokens, int), ("weights", weights, (int, float))):
            if not isinstance(values, list) or not all(isinstance(each, kind) for each in values):
                raise self._error(f"{name!r} is no list of numbers")
        if len(tokens) != len(weights) or not tokens:
            fact = f"{len(tokens)} tokens have {len(weights)} weights"
            raise self._error(fact, hint="each token has the weight with which it counts as a target")
        return WeightedTokens(tuple(tokens), tuple(map(float, weights)))

    def _with_common_prompt(self, chosen: Any, rejected: Any) -> Pair:
        if isinstance(chosen, str) or isinstance(rejected, str):
            raise self._error("the pair has no 'prompt', and its answers are texts")
        both = [self._turns(chosen), self._turns(rejected)]
        shared = 0
        for one, other in zip(*both, strict=False):
            if one.message != other.message:
                break
            shared += 1
        if shared == 0 or shared >= min(map(len, both)):
            raise self._error("'chosen' and 'rejected' do not begin alike and then differ")
        ready = [
            [replace(turn, weight=0.0) if turn.is_answer else turn for turn in each[:shared]] + each[shared:]
            for each in both
        ]
        return Pair(self._conversation(ready[0]), self._conversation(ready[1]))

    def _conversation(self, turns: list[Turn]) -> Conversation:
        if not any(turn.is_answer for turn in turns):
            hint = "remove the record; only turns of the assistant are trained"
            raise self._error("the conversation has no turn of the assistant", hint=hint)
        return Conversation(tuple(turns), self._tools())

    def _system(self) -> list[Turn]:
        text = self.record.get("system")
        return [_turn("system", self._text(text, "system"))] if text else []

    def _tools(self) -> Sequence[Any] | None:
        tools = _parsed(self.record.get("tools"))
        if not tools:
            return None
        if not isinstance(tools, list):
            raise self._error("'tools' is neither a list nor its JSON text")
        return _without_nulls(tools)

    def _turns(self, messages: Any, *, first: int = 0) -> list[Turn]:
        messages = _parsed(messages)
        if not isinstance(messages, list) or not messages:
            raise self._error("the conversation is no list of messages, or an empty one")
        return [self._read_turn(message, first + index) for index, message in enumerate(messages)]

    def _read_turn(self, message: Any, index: int) -> Turn:
        if not isinstance(message, Mapping):
            raise self._error("the turn is no object with 'role' and 'content'", turn=index)
        message = {key: value for key, value in message.items() if value is not None or key == "content"}
        name = message.pop("role", None) or message.pop("from", None)
        content = message.pop("content", None)
        content = message.pop("value", None) if content is None else content
        weight = self._weight({key: message.pop(key) for key in _CONTROLS if key in message}, name, index)
        role = self._role(name, index)
        message = {key: _without_nulls(value) for key, value in message.items()}
        if name == "function_call":
            message["tool_calls"], content = [{"type": "function", "function": _parsed(content)}], None
        if "tool_calls" in message:
            message["tool_calls"] = [_with_parsed_arguments(call) for call in message["tool_calls"]]
        content = self._content(content, message, role=role, weight=weight, index=index)
        return Turn({"role": role, "content": content, **message}, weight)

    def _role(self, name: Any, index: int) -> str:
        role = _ROLE_OF.get(name) if isinstance(name, str) else None
        if role is None:
            fact = f"the role {name!r} is not known" if name else "the turn has no role"
            hint = f"roles are {', '.join(ROLES)}; ShareGPT's human, gpt, function_call and observation"
            raise self._error(fact, hint=hint, turn=index, role="")
        return role

    def _weight(self, controls: Mapping[str, Any], name: Any, index: int) -> float | None:
        if not controls:
            return None
        train, weight = controls.get("train", True), controls.get("weight", 1.0)
        if not isinstance(train, bool) or isinstance(weight, bool) or not isinstance(weight, (int, float)):
            fact = f"train={train!r}, weight={weight!r}: 'train' is true or false, 'weight' a number"
            raise self._error(fact, turn=index)
        if _ROLE_OF.get(name) != ASSISTANT:
            if train and weight and ("train" in controls or "weight" in controls):
                hint = "remove the key; `--train all` trains every turn"
                raise self._error("only turns of the assistant can be trained", hint=hint, turn=index)
            return None
        return float(weight) if train else 0.0

    def _content(
        self, content: Any, message: Mapping[str, Any], *, role: str, weight: float | None, index: int
    ) -> str | None:
        if isinstance(content, list):
            content = self._joined(content, index)
        if content is not None and not isinstance(content, str):
            fact = f"the content is {json.dumps(content, default=str)[:40]}, not text"
            raise self._error(fact, turn=index, role=role)
        is_empty = not (content or "").strip() and not message.get("tool_calls")
        if is_empty and role == ASSISTANT and weight != 0:
            hint = 'remove the record, or mark the turn with "train": false'
            raise self._error("the answer is empty", hint=hint, turn=index, role=role)
        if content is None and not message.get("tool_calls"):
            raise self._error("the turn has no content", turn=index, role=role)
        return _printable(content)

    def _joined(self, parts: list[Any], index: int) -> str:
        for part in parts:
            if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, Mapping) else part
                raise self._error(f"a part of the content is {kind!r}; only text is read", turn=index)
        return "".join(part["text"] for part in parts)

    def _answer(self, value: Any, key: str) -> Turn:
        text = self._text(value, key)
        if not text.strip():
            raise self._error(f"the answer {key!r} is empty", hint="remove the record")
        return _turn(ASSISTANT, text)

    def _text(self, value: Any, key: str) -> str:
        if not isinstance(value, str):
            raise self._error(f"{key!r} is {json.dumps(value, default=str)[:40]}, not text")
        return _printable(value) or ""

    def _error(self, fact: str, *, hint: str = "", turn: int | None = None, role: str = "") -> DataError:
        place = "" if turn is None else f", turn {turn + 1}{f' ({role})' if role else ''}"
        return DataError(fact, where=f"{self.where}{place}", hint=hint)


def _turn(role: str, text: str) -> Turn:
    return Turn({"role": role, "content": text})


def _parsed(value: Any) -> Any:
    """A value, or the value of its JSON text; text that is no JSON stays as it is."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _with_parsed_arguments(call: Any) -> Any:
    """A tool call whose arguments are an object, as templates expect; OpenAI writes their JSON text."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        return call
    function = call["function"]
    arguments = _parsed(function.get("arguments"))
    return {**call, "function": {**function, "arguments": arguments}} if "arguments" in function else call


def _without_nulls(value: Any) -> Any:
    """Nested values without null: tables have every key in every row."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, (list, tuple)):
        return [_without_nulls(each) for each in value]
    return value


def _printable(text: str | None) -> str | None:
    """Text without lone surrogates, which JSON allows and UTF-8 does not."""
    if text is None or text.isascii():
        return text
    return text.encode("utf-8", errors="replace").decode("utf-8")
