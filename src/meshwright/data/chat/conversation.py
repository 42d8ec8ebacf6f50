"""Chats of every common format as one kind of value: turns with roles, and a loss weight for each turn.

messages            {"messages": [{"role", "content"}, ...], "tools"?}             OpenAI, Hugging Face
sharegpt            {"conversations": [{"from", "value"}, ...], "system"?, "tools"?}
alpaca              {"instruction", "input"?, "output", "system"?, "history"?}
prompt-completion   {"prompt", "completion"}, both texts or both lists of messages
preference          {"prompt"?, "chosen", "rejected"}: texts, messages, or whole conversations
tokens              {"input_ids", "weights"}: tokens and the loss weight of each, such as advantages
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from meshwright.data.chat.turns import ASSISTANT, SYSTEM_ROLES, Turn, read_turn, text_turn, weight_trouble
from meshwright.data.chat.values import parsed, printable, without_nulls
from meshwright.errors import DataError

ChatFormat = Literal["messages", "sharegpt", "alpaca", "prompt-completion", "preference", "tokens"]
_FORMATS: tuple[tuple[ChatFormat, tuple[str, ...]], ...] = (
    ("preference", ("chosen", "rejected")),
    ("messages", ("messages",)),
    ("sharegpt", ("conversations",)),
    ("alpaca", ("instruction", "output")),
    ("prompt-completion", ("prompt", "completion")),
    ("tokens", ("input_ids", "weights")),
)
_NEVER_FIRST = ("user", *SYSTEM_ROLES)
"""Roles with which no answer begins."""


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
    keys = ", ".join(_shown(key, record[key]) for key in list(record)[:8]) or "nothing"
    known = "; ".join(f"{name}: {' and '.join(needed)}" for name, needed in _FORMATS)
    raise DataError(f"the record is no chat: it has {keys}", where=where, hint=f"the formats need {known}")


def _shown(key: str, value: Any) -> str:
    return f"{key!r} (null)" if value is None else repr(key)


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
        return self._conversation(self._with_system(self._turns(self.record["messages"])))

    def sharegpt(self) -> Conversation:
        return self._conversation(self._with_system(self._turns(self.record["conversations"])))

    def alpaca(self) -> Conversation:
        record = self.record
        question = self._text(record["instruction"], "instruction")
        given = record.get("input")
        question = f"{question}\n{self._text(given, 'input')}" if given else question
        turns: list[Turn] = []
        history = record.get("history") or []
        for pair in history if isinstance(history, list) else [history]:
            if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
                hint = 'write "history": [["question", "answer"], ...]'
                raise self._error("an entry of 'history' is no pair of a question and an answer", hint=hint)
            turns += [text_turn("user", self._text(pair[0], "history")), self._answer(pair[1], "history")]
        turns += [text_turn("user", question), self._answer(record["output"], "output")]
        return self._conversation(self._with_system(turns))

    def preference(self) -> Pair:
        record = self.record
        chosen, rejected = record["chosen"], record["rejected"]
        prompt = record.get("prompt")
        prompt = record.get("conversations") if prompt is None else prompt
        if chosen == rejected:
            raise self._equal_answers()
        are_texts = isinstance(prompt, str) and isinstance(chosen, str) and isinstance(rejected, str)
        if are_texts and not self.texts_are_turns:
            one, other = (chosen, "chosen"), (rejected, "rejected")
            return Pair(self._completion(str(prompt), *one), self._completion(str(prompt), *other))
        if prompt is not None:
            return self._pair(
                self._answered(prompt, chosen, "chosen"), self._answered(prompt, rejected, "rejected")
            )
        if isinstance(chosen, str) or isinstance(rejected, str):
            hint = "add 'prompt', or write both answers as lists of messages that begin alike"
            raise self._error("the pair has no 'prompt', and its answers are texts", hint=hint)
        return self._pair(self._turns(chosen), self._turns(rejected))

    def completed(self, prompt: Any, answer: Any, key: str) -> Sample:
        """A prompt and its answer; earlier answers, inside the prompt, are not trained."""
        if self.record.get("label") is False:
            hint = "remove the record, or write pairs of answers (`chosen` and `rejected`)"
            raise self._error("'label' is false: the answer is unwanted, and would be trained", hint=hint)
        if isinstance(prompt, str) and isinstance(answer, str) and not self.texts_are_turns:
            return self._completion(prompt, answer, key)
        return self._conversation(self._with_system(self._answered(prompt, answer, key)))

    def tokens(self) -> WeightedTokens:
        tokens, weights = self.record["input_ids"], self.record["weights"]
        for name, values, kind in (("input_ids", tokens, int), ("weights", weights, (int, float))):
            if not isinstance(values, list) or not all(isinstance(each, kind) for each in values):
                hint = 'write {"input_ids": [1, 2, 3], "weights": [0, 1, 1]}'
                raise self._error(f"{name!r} is no list of numbers", hint=hint)
        if len(tokens) != len(weights) or not tokens:
            fact = f"{len(tokens)} tokens have {len(weights)} weights"
            raise self._error(fact, hint="each token has the weight with which it counts as a target")
        for weight in weights:
            if (trouble := weight_trouble(weight)) is not None:
                raise self._error(trouble.fact, hint=trouble.hint)
        return WeightedTokens(tuple(tokens), tuple(map(float, weights)))

    def _completion(self, prompt: str, answer: str, key: str) -> Completion:
        if not answer.strip():
            raise self._error(f"{key!r} is empty, so there is nothing to train on", hint="remove the record")
        return Completion(printable(prompt), printable(answer))

    def _answered(self, prompt: Any, answer: Any, key: str) -> list[Turn]:
        """The turns of a prompt and of its answer, which may be the conversation with the prompt in it."""
        before = [text_turn("user", self._text(prompt, "prompt"))] if isinstance(prompt, str) else None
        before = self._turns(prompt) if before is None else before
        if isinstance(answer, str):
            after = [self._answer(answer, key)]
        else:
            after = self._turns([answer] if isinstance(answer, Mapping) else answer, first=len(before))
            before, after = _without_repetition(before, after)
        if not any(turn.is_answer for turn in after):
            raise self._error(
                f"{key!r} has no turn of the assistant", hint="remove the record, or add the answer"
            )
        if after[0].role in _NEVER_FIRST:
            hint = "begin it with the answer, or with the prompt as it is in 'prompt'"
            raise self._error(f"{key!r} begins with a turn of the {after[0].role}", hint=hint)
        return [*map(_untrained, before), *after]

    def _pair(self, chosen: list[Turn], rejected: list[Turn]) -> Pair:
        """Two conversations that begin alike: what they share is not trained."""
        shared = 0
        for one, other in zip(chosen, rejected, strict=False):
            if one.message != other.message:
                break
            shared += 1
        self._require_difference(chosen, rejected, shared)
        for turn in [*chosen[shared:], *rejected[shared:]]:
            self._require_plain_weight(turn)
        ready = [[*map(_untrained, each[:shared]), *each[shared:]] for each in (chosen, rejected)]
        one, other = (self._conversation(self._with_system(each)) for each in ready)
        return Pair(one, other)

    def _require_difference(self, chosen: list[Turn], rejected: list[Turn], shared: int) -> None:
        """DataError where the conversations have no first turn in common, or one has nothing of its own."""
        if shared == len(chosen) == len(rejected):
            raise self._equal_answers()
        if shared == 0:
            hint = "without 'prompt', both are conversations with the same first turns and other last ones"
            raise self._error("'chosen' and 'rejected' do not begin alike", hint=hint)
        for key, other, turns in (("chosen", "rejected", chosen), ("rejected", "chosen", rejected)):
            if shared == len(turns):
                hint = "end both with turns that differ, or remove the record"
                raise self._error(f"{other!r} begins with all of {key!r}, which has no turn left", hint=hint)

    def _require_plain_weight(self, turn: Turn) -> None:
        if turn.weight not in (None, 0.0, 1.0):
            fact = (
                f"a turn of the pair has weight {turn.weight:g}; an answer is the plain sum of its log-probs"
            )
            hint = "leave 'weight' out; with \"train\": false a turn does not count"
            raise self._error(fact, hint=hint)

    def _equal_answers(self) -> DataError:
        hint = "remove the record: equal answers state no preference"
        return self._error("'chosen' and 'rejected' are equal", hint=hint)

    def _conversation(self, turns: list[Turn]) -> Conversation:
        if not any(turn.is_answer for turn in turns):
            hint = "remove the record; only turns of the assistant are trained"
            raise self._error("the conversation has no turn of the assistant", hint=hint)
        return Conversation(tuple(turns), self._tools())

    def _with_system(self, turns: list[Turn]) -> list[Turn]:
        """The turns after the record's own `system`, where it has one that is not the first turn already."""
        given = self.record.get("system")
        if not given:
            return turns
        system = text_turn("system", self._text(given, "system"))
        if turns[0].role not in SYSTEM_ROLES:
            return [system, *turns]
        if turns[0].text != system.text:
            hint = "leave one of them out"
            raise self._error("the record has 'system', and its first turn is another one", hint=hint)
        return turns

    def _tools(self) -> Sequence[Any] | None:
        tools = parsed(self.record.get("tools"))
        if not tools:
            return None
        tools = [parsed(tool) for tool in tools] if isinstance(tools, list) else []
        if not tools or not all(isinstance(tool, Mapping) for tool in tools):
            hint = 'write "tools": [{"type": "function", "function": {"name": "..."}}]'
            raise self._error("'tools' is neither a list of objects nor its JSON text", hint=hint)
        return printable(without_nulls(tools))

    def _turns(self, messages: Any, *, first: int = 0) -> list[Turn]:
        messages = parsed(messages)
        if not isinstance(messages, list) or not messages:
            hint = 'write a list of turns such as {"role": "user", "content": "..."}'
            raise self._error("the conversation is no list of messages, or an empty one", hint=hint)
        return [
            read_turn(message, where=self.where, turn=turn) for turn, message in enumerate(messages, first)
        ]

    def _answer(self, value: Any, key: str) -> Turn:
        text = self._text(value, key)
        if not text.strip():
            raise self._error(f"the answer {key!r} is empty", hint="remove the record")
        return text_turn(ASSISTANT, text)

    def _text(self, value: Any, key: str) -> str:
        if not isinstance(value, str):
            fact = f"{key!r} is {json.dumps(value, default=str)[:40]}, not text"
            raise self._error(fact, hint="write it as a string")
        return printable(value)

    def _error(self, fact: str, *, hint: str) -> DataError:
        return DataError(fact, where=self.where, hint=hint)


def _untrained(turn: Turn) -> Turn:
    return replace(turn, weight=0.0) if turn.is_answer else turn


def _without_repetition(before: list[Turn], after: list[Turn]) -> tuple[list[Turn], list[Turn]]:
    """(prompt, answer) where the answer is the conversation from its begin, with the prompt in it.

    A prompt of one turn, such as the text in many datasets of preferences, may follow a system turn there.
    """
    begin = 0
    while len(before) == 1 and begin < len(after) - 1 and after[begin].role in SYSTEM_ROLES:
        begin += 1
    end = begin + len(before)
    if [turn.message for turn in after[begin:end]] != [turn.message for turn in before]:
        return before, after
    return after[:end], after[end:]
