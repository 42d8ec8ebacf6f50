"""Values inside messages as chat templates expect them: JSON text parsed, no null, text that is UTF-8."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

TAG_MARKS = "\ufdd0", "\ufdd1"
"""Noncharacters, which no text of any language has: they enclose the output of `{% generation %}` blocks."""
_WITHOUT_MARKS = str.maketrans(dict.fromkeys(TAG_MARKS, "\ufffd"))

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names of the reasoning of a message; a template reads one of the first two."""
WRITTEN_FIELDS = frozenset({*REASONING_FIELDS, "tool_calls", "function_call", "tools"})
"""Fields beside the content that a chat means to be written; the others, such as ids of calls, may not be."""
Messages = Sequence[Mapping[str, Any]]


def notations(messages: Messages) -> Iterator[Messages]:
    """The messages as most templates read them, and then in the notations that the others need.

    Reasoning is given under the names that templates read, as transformers does. Some templates (DeepSeek)
    put the arguments of calls into the text as they are, some (gpt-oss) look into a content that is null.
    """
    messages = [_with_reasoning(message) for message in messages]
    yield messages
    if any("tool_calls" in message for message in messages):
        as_text = [_with_arguments_as_text(message) for message in messages]
        yield as_text
        yield from ([*map(_without_null_content, each)] for each in (messages, as_text))


def names_of(field: str) -> Sequence[str]:
    """The names under which a template gets a field of messages."""
    return REASONING_FIELDS if field in REASONING_FIELDS else (field,)


def _with_reasoning(message: Mapping[str, Any]) -> Mapping[str, Any]:
    reasoning = next((message[name] for name in REASONING_FIELDS if name in message), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _with_arguments_as_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    calls = [_call_with_text(call) for call in message.get("tool_calls", [])]
    return {**message, "tool_calls": calls} if calls else message


def _call_with_text(call: Mapping[str, Any]) -> Mapping[str, Any]:
    if "function" in call:
        return {**call, "function": _call_with_text(call["function"])}
    arguments = call.get("arguments", "")
    if isinstance(arguments, str):
        return call
    return {**call, "arguments": json.dumps(arguments, ensure_ascii=False)}


def _without_null_content(message: Mapping[str, Any]) -> Mapping[str, Any]:
    return {key: value for key, value in message.items() if key != "content" or value is not None}


def parsed(value: Any) -> Any:
    """A value, or the value of its JSON text; text that is no JSON stays as it is."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def without_nulls(value: Any) -> Any:
    """Nested values without null: tables have every key in every row."""
    if isinstance(value, Mapping):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, (list, tuple)):
        return [without_nulls(each) for each in value]
    return value


def printable(value: Any) -> Any:
    """Nested values without lone surrogates, which JSON allows and UTF-8 does not, and without TAG_MARKS."""
    if isinstance(value, str):
        return value if value.isascii() else _printable_text(value)
    if isinstance(value, Mapping):
        return {printable(key): printable(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [printable(each) for each in value]
    return value


def _printable_text(text: str) -> str:
    return text.encode("utf-8", errors="replace").decode("utf-8").translate(_WITHOUT_MARKS)


def tool_calls(value: Any) -> list[Mapping[str, Any]]:
    """Calls of tools with their arguments as objects; ValueError, with the reason, where a value is no calls.

    OpenAI writes the arguments as JSON text, tables the list of calls too.
    """
    value = parsed(value)
    calls = [value] if isinstance(value, Mapping) else value
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise ValueError(f"the calls of tools are {_shown(value)}, no list of objects")
    return [_call(call) for call in calls]


def function_calls(value: Any) -> list[Mapping[str, Any]]:
    """The calls of a ShareGPT turn `function_call`: the JSON text of one call, or of a list."""
    value = parsed(value)
    functions = value if isinstance(value, list) else [value]
    if not functions or not all(isinstance(each, Mapping) for each in functions):
        raise ValueError(f"the call of a function is {_shown(value)}, no JSON object with a name")
    return tool_calls([{"type": "function", "function": each} for each in functions])


def _call(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """A call whose arguments are an object, as templates expect; it has a function, or is one itself."""
    function = call.get("function")
    if function is None:
        return _function(call)
    if not isinstance(function, Mapping):
        raise ValueError(f"the function of a call is {_shown(function)}, no object with a name")
    return {**call, "function": _function(function)}


def _function(function: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(function.get("name"), str):
        raise ValueError(f"a call has no name: {_shown(function)}")
    return {**function, "arguments": parsed(function["arguments"])} if "arguments" in function else function


def _shown(value: Any) -> str:
    return json.dumps(value, default=str)[:40]
