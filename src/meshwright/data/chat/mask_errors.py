"""Refusals of answers whose tokens cannot be found by prefix rendering: fact, turn and what to do."""

from meshwright.data.chat.template import ChatTemplate
from meshwright.errors import DataError

_SHOWN_CHARACTERS = 40
_THINKING = "enable_thinking"
_TAGGED = "pass a template that marks the answers with {% generation %} (--template FILE)"


def place_of(where: str, turn: int) -> str:
    """The place of an answer in the input."""
    return f"{where}, turn {turn + 1} (assistant)"


def ways_out(template: ChatTemplate, *, is_last: bool) -> str:
    """What helps where the tokens of an answer cannot be found; is_last: no answer follows it."""
    if not is_last:
        return f"{_TAGGED}, or train the last turn only (--train last)"
    if template.variables.get(_THINKING) is not False and not template.unread([_THINKING]):
        return f"{_TAGGED}, or where no answer has thinking, render none (--template-var {_THINKING}=false)"
    return _TAGGED


def rewritten_error(before: str, text: str, place: str, hint: str) -> DataError:
    """The rendering before an answer is no begin of the conversation's."""
    at = next(
        (index for index, pair in enumerate(zip(before, text, strict=False)) if pair[0] != pair[1]), len(text)
    )
    expected, found = (each[at : at + _SHOWN_CHARACTERS] for each in (before, text))
    fact = (
        "the template renders the turns before differently when this turn follows, so its tokens cannot be "
        f"found: {expected!r} became {found!r}"
    )
    return DataError(fact, where=place, hint=hint)


def joined_error(answer: str, place: str, hint: str) -> DataError:
    """The texts before the answer agree and their tokens do not: a token lies on both sides of its begin."""
    fact = (
        f"a token reaches from the prompt into the answer, which begins with {answer[:_SHOWN_CHARACTERS]!r}"
    )
    first = "remove what joins, such as a newline at its begin, leave the record out (--max-bad)"
    return DataError(fact, where=place, hint=f"{first}, {'' if ', or ' in hint else 'or '}{hint}")


def unwritten_error(place: str) -> DataError:
    """The rendering up to the answer has nothing more than the one before it."""
    fact = "the template writes nothing for this turn"
    return DataError(fact, where=place, hint="pass another with --template FILE")


def unwritten_calls_error(place: str) -> DataError:
    """An answer that is only calls of tools, and a template that does not write them."""
    fact = "the answer is only calls of tools, and the template writes none: it would be empty"
    hint = 'pass a template that writes them (--template FILE), or mark the turn with "train": false'
    return DataError(fact, where=place, hint=hint)


def changed_error(closing: str, place: str, hint: str) -> DataError:
    """The rendering up to the answer is no begin of the conversation's, from `closing` on."""
    shown = closing[:_SHOWN_CHARACTERS]
    fact = (
        "the tokens of this turn change when later turns follow, so its trained tokens cannot be found"
        f"{f': {shown!r} is missing' if shown.strip() else ''}"
    )
    return DataError(fact, where=place, hint=hint)
