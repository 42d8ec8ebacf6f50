"""One message of a chat as a turn: its role, its text, its calls of tools and its loss weight.

A turn of the assistant may have `"train": false` or `"weight": 0.5`, which is its loss weight. A weight may
be negative: the answer then becomes less probable.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from meshwright.data.chat.values import function_calls, printable, tool_calls, without_nulls
from meshwright.errors import DataError

ASSISTANT = "assistant"
SYSTEM_ROLES = ("system", "developer")
ROLES = (*SYSTEM_ROLES, "user", ASSISTANT, "tool", "function")
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
_CONTROLS, _UNREAD_CONTROL = ("train", "weight"), "train_detail"
# Of fp16, in which datasets store weights.
_SMALLEST_WEIGHT, _LARGEST_WEIGHT = 2.0**-24, 65504.0


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
    def text(self) -> str:
        """What it says; calls of tools may stand alone."""
        return self.message.get("content") or ""

    @property
    def is_answer(self) -> bool:
        """Whether the model writes this turn."""
        return self.role == ASSISTANT


def text_turn(role: str, text: str) -> Turn:
    """A turn that is only text."""
    return Turn({"role": role, "content": text})


@dataclass(frozen=True)
class _Place:
    """Where a turn is."""

    where: str
    turn: int
    role: str = ""

    def error(self, fact: str, *, hint: str) -> DataError:
        role = f" ({self.role})" if self.role else ""
        return DataError(fact, where=f"{self.where}, turn {self.turn + 1}{role}", hint=hint)


def read_turn(message: Any, *, where: str, turn: int) -> Turn:
    """A message of any notation as a turn; DataError with its place where it is malformed."""
    place = _Place(where, turn)
    if not isinstance(message, Mapping):
        hint = 'a turn is {"role": "user", "content": "..."}'
        raise place.error("the turn is no object with 'role' and 'content'", hint=hint)
    message = {key: value for key, value in message.items() if value is not None or key == "content"}
    name = message.pop("role", None) or message.pop("from", None)
    role = _role(name, place)
    has_content = "content" in message or "value" in message
    content = message.pop("content", None)
    content = message.pop("value", None) if content is None else content
    if message.get(_UNREAD_CONTROL):
        hint = "split the turn, weigh it as one (`train`, `weight`), or write tokens with weights"
        raise place.error(f"{_UNREAD_CONTROL!r} trains parts of a turn, and is not read", hint=hint)
    weight = _weight({key: message.pop(key) for key in _CONTROLS if key in message}, role, place)
    message = {key: without_nulls(value) for key, value in message.items()}
    place = _Place(where, turn, role)
    try:
        if name == "function_call":
            message["tool_calls"], content = function_calls(content), None
        elif message.get("tool_calls"):
            message["tool_calls"] = tool_calls(message["tool_calls"])
    except ValueError as error:
        hint = 'a call is {"type": "function", "function": {"name": "...", "arguments": {}}}'
        raise place.error(str(error), hint=hint) from None
    if not message.get("tool_calls"):
        message.pop("tool_calls", None)
    text = _content(content, has_calls="tool_calls" in message, weight=weight, place=place)
    written = {"content": text} if has_content else {}  # some templates ask only whether the key is there
    return Turn(printable({"role": role, **written, **message}), weight)


def _role(name: Any, place: _Place) -> str:
    role = _ROLE_OF.get(name) if isinstance(name, str) else None
    if role is None:
        fact = f"the role {name!r} is not known" if name else "the turn has no role"
        hint = f"roles are {', '.join(ROLES)}; ShareGPT's human, gpt, function_call and observation"
        raise place.error(fact, hint=hint)
    return role


def _weight(controls: Mapping[str, Any], role: str, place: _Place) -> float | None:
    if not controls:
        return None
    train, weight = controls.get("train", True), controls.get("weight", 1.0)
    if not isinstance(train, bool) or isinstance(weight, bool) or not isinstance(weight, (int, float)):
        hint = "'train' is true or false, 'weight' a number"
        raise place.error(f"the turn has train={train!r}, weight={weight!r}", hint=hint)
    if (trouble := weight_trouble(weight)) is not None:
        raise place.error(trouble.fact, hint=trouble.hint)
    if role != ASSISTANT:
        if train and weight:
            hint = "remove the key; `--train all` trains every turn"
            raise place.error("only turns of the assistant can be trained", hint=hint)
        return None
    return float(weight) if train else 0.0


class WeightTrouble(NamedTuple):
    """Why a weight cannot be stored."""

    fact: str
    hint: str


def weight_trouble(weight: float) -> WeightTrouble | None:
    """Why the dataset cannot store a loss weight; None where it can."""
    if not weight or _SMALLEST_WEIGHT <= abs(weight) <= _LARGEST_WEIGHT:  # NaN is in no range
        return None
    sizes = f"weights are 0, or from {_SMALLEST_WEIGHT:.1g} to {_LARGEST_WEIGHT:,.0f} in size: scale them"
    return WeightTrouble(f"the weight {weight} has no value in fp16", sizes)


def _content(content: Any, *, has_calls: bool, weight: float | None, place: _Place) -> str | None:
    if isinstance(content, list):
        content = _joined(content, place)
    if content is not None and not isinstance(content, str):
        fact = f"the content is {json.dumps(content, default=str)[:40]}, not text"
        raise place.error(fact, hint="write it as a string")
    is_empty = not (content or "").strip() and not has_calls
    if is_empty and place.role == ASSISTANT and weight != 0:
        hint = 'remove the record, or mark the turn with "train": false'
        raise place.error("the answer is empty", hint=hint)
    if content is None and not has_calls:
        raise place.error("the turn has no content", hint="remove the turn")
    return content


def _joined(parts: list[Any], place: _Place) -> str:
    texts = list[str]()
    for part in parts:
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else part
            hint = "remove the record, or leave up to N such records out with --max-bad N"
            raise place.error(f"a part of the content is {kind!r}; only text is read", hint=hint)
        texts.append(text)
    return "".join(texts)
