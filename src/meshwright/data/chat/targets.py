"""Tokens of conversations, and the loss weight of each: which tokens the model is trained to write.

A template with `{% generation %}` says itself what the model writes. For any other template the trained
tokens of an answer are those between two renderings: the turns before it with the generation prompt, and the
turns up to it (prefix rendering). That holds only where both are a prefix of the tokens of the conversation.
A template that rewrites earlier turns (one that removes their thinking) fails this check, and is refused with
the turn.

The end-of-turn token is trained: without it a model does not learn to stop. What the template writes after it
belongs to no turn and is not trained.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.data.chat.conversation import Completion, Conversation, Sample, WeightedTokens
from meshwright.data.chat.template import ChatTemplate, Rendered
from meshwright.data.tokenize import HuggingFaceTokenizer
from meshwright.errors import DataError

Trained = Literal["assistant", "last", "all"]
_SHOWN_CHARACTERS = 40


class Encoded(NamedTuple):
    """The tokens of one sample."""

    tokens: NDArray[np.uint32]
    weights: NDArray[np.float32]
    """Loss weight of each token as a target."""
    last_trained: list[int]
    """The last trained token of each trained turn: the end-of-turn token, where it is trained."""

    @property
    def num_trained(self) -> int:
        """Tokens that are trained; the first token of a document is never a target."""
        return int(np.count_nonzero(self.weights[1:]))


class _Asked(NamedTuple):
    """A trained turn, and the texts that enclose it."""

    turn: int
    weight: float
    before: str
    upto: str


class _Plan(NamedTuple):
    """A sample whose texts are rendered and not yet encoded."""

    sample: Sample
    where: str
    rendered: Rendered
    asked: list[_Asked]

    @property
    def is_tagged(self) -> bool:
        return bool(self.rendered.spans)

    def texts(self) -> list[str]:
        enclosing = [text for one in self.asked for text in (one.before, one.upto)]
        return [self.rendered.text, *enclosing]


@dataclass(frozen=True)
class ChatEncoder:
    """Encodes samples. A template that was opened is needed for conversations, not for plain completions."""

    tokenizer: HuggingFaceTokenizer
    template: ChatTemplate | None
    trained: Trained = "assistant"

    def encode(self, samples: Sequence[tuple[Sample, str]]) -> list[Encoded | DataError]:
        """The tokens of samples, each with its place in the input; a bad sample is its error."""
        plans = [self._planned(sample, where) for sample, where in samples]
        ready = [plan for plan in plans if isinstance(plan, _Plan)]
        # Only blocks of a template need offsets into the text, which cost time.
        encodings = {
            is_tagged: iter(
                self.tokenizer.encodings(
                    [text for plan in ready if plan.is_tagged == is_tagged for text in plan.texts()],
                    with_offsets=is_tagged,
                )
            )
            for is_tagged in (False, True)
        }
        found: list[Encoded | DataError] = []
        for plan in plans:
            if isinstance(plan, DataError):
                found.append(plan)
                continue
            own = [next(encodings[plan.is_tagged]) for _ in plan.texts()]
            try:
                found.append(self._encoded(plan, own))
            except DataError as error:
                found.append(error)
        return found

    def _planned(self, sample: Sample, where: str) -> _Plan | DataError:
        try:
            if isinstance(sample, Completion):
                asked = [_Asked(0, 1.0, sample.prompt, sample.completion)]
                return _Plan(sample, where, Rendered(sample.prompt + sample.completion, []), asked)
            if isinstance(sample, WeightedTokens):
                return _Plan(sample, where, Rendered("", []), [])
            return self._rendered(sample, where)
        except DataError as error:
            return error

    def _rendered(self, sample: Conversation, where: str) -> _Plan:
        template, messages = self._required_template(where), sample.messages
        tools = sample.tools
        rendered = template.render(messages, tools=tools, where=where)
        if template.is_tagged(with_tools=tools is not None):
            return _Plan(sample, where, rendered, [])
        asked = []
        for turn, weight in self._weighted_turns(sample):
            place = _place(where, turn)
            before = template.render(messages[:turn], tools=tools, where=place, add_generation_prompt=True)
            upto = template.render(messages[: turn + 1], tools=tools, where=place)
            _require_beginning(before.text, rendered.text, place)
            asked.append(_Asked(turn, weight, before.text, upto.text))
        return _Plan(sample, where, rendered, asked)

    def _required_template(self, where: str) -> ChatTemplate:
        if self.template is None:
            hint = "pass the model's template with --template FILE, or take the tokenizer of the chat model"
            raise DataError("the tokenizer has no chat template", where=where, hint=hint)
        return self.template

    def _weighted_turns(self, sample: Conversation) -> list[tuple[int, float]]:
        """Turns whose tokens must be known, with their weights."""
        weights = self._answer_weights(sample)
        if (
            self.trained == "all"
        ):  # every token is trained; only turns with a weight of their own are looked up
            return [(turn, weight) for turn, weight in weights if sample.turns[turn].weight is not None]
        return [(turn, weight) for turn, weight in weights if weight]

    def _answer_weights(self, sample: Conversation) -> list[tuple[int, float]]:
        answers = sample.answers()
        chosen = answers[-1:] if self.trained == "last" else answers
        weights = ((turn, sample.turns[turn].weight) for turn in chosen)
        return [(turn, 1.0 if weight is None else weight) for turn, weight in weights]

    def _encoded(self, plan: _Plan, encodings: list[Any]) -> Encoded:
        if isinstance(plan.sample, Completion):
            return self._completion(plan.sample, encodings)
        if isinstance(plan.sample, WeightedTokens):
            return self._given(plan.sample, plan.where)
        tokens = np.array(encodings[0].ids, dtype=np.uint32)
        weights = np.full(len(tokens), float(self.trained == "all"), dtype=np.float32)
        ends: list[int] = []
        spans = (
            self._enclosed_spans(plan, tokens, encodings[1:])
            if plan.asked or not plan.rendered.spans
            else self._tagged_spans(plan, encodings[0])
        )
        for begin, end, weight in spans:
            weights[begin:end] = weight
            if weight:
                ends.append(int(tokens[end - 1]))
        return Encoded(tokens, weights, ends)

    def _completion(self, sample: Completion, encodings: list[Any]) -> Encoded:
        """Prompt, completion and end of document; the prompt has the tokens that it has at inference."""
        joint, prompt, completion = (each.ids for each in encodings)
        if joint[: len(prompt)] != prompt:  # a token reaches from the prompt into the completion
            joint = prompt + completion
        begin = [] if joint[:1] == self.tokenizer.begin_ids else self.tokenizer.begin_ids
        tokens = np.array([*begin, *joint, self.tokenizer.eos_id], dtype=np.uint32)
        weights = np.full(len(tokens), float(self.trained == "all"), dtype=np.float32)
        weights[len(begin) + len(prompt) :] = 1.0
        return Encoded(tokens, weights, [self.tokenizer.eos_id])

    def _given(self, sample: WeightedTokens, where: str) -> Encoded:
        if not 0 <= min(sample.tokens) <= max(sample.tokens) < self.tokenizer.vocab_size:
            fact = f"tokens from {min(sample.tokens)} to {max(sample.tokens)} are outside the vocabulary"
            hint = f"the tokenizer has {self.tokenizer.vocab_size} tokens"
            raise DataError(fact, where=where, hint=hint)
        tokens = np.array(sample.tokens, dtype=np.uint32)
        weights = np.array(sample.weights, dtype=np.float32)
        last = [int(tokens[index]) for index in np.flatnonzero(weights)[-1:]]
        return Encoded(tokens, weights, last)

    def _tagged_spans(self, plan: _Plan, encoding: Any) -> list[tuple[int, int, float]]:
        """The tokens of `{% generation %}` blocks, with their weights."""
        assert isinstance(plan.sample, Conversation)
        spans = plan.rendered.spans
        weights = self._block_weights(plan, len(spans))
        found = []
        for (begin, end), weight in zip(spans, weights, strict=True):
            at = (encoding.char_to_token(place) for place in range(begin, end))
            first = next((token for token in at if token is not None), None)
            back = (encoding.char_to_token(place) for place in range(end - 1, begin - 1, -1))
            last = next((token for token in back if token is not None), None)
            if first is not None and last is not None:
                found.append((first, last + 1, weight))
        return found

    def _block_weights(self, plan: _Plan, num_blocks: int) -> list[float]:
        assert isinstance(plan.sample, Conversation)
        answers = plan.sample.answers()
        weights = dict(self._answer_weights(plan.sample))
        if num_blocks == len(answers):
            return [weights.get(turn, 0.0) for turn in answers]
        if self.trained != "last" and all(plan.sample.turns[turn].weight is None for turn in answers):
            return [1.0] * num_blocks
        raise DataError(
            f"the template marks {num_blocks} answers, the conversation has {len(answers)}",
            where=plan.where,
            hint="weights of single turns need a template that marks each turn of the assistant once",
        )

    def _enclosed_spans(
        self, plan: _Plan, tokens: NDArray[np.uint32], encodings: list[Any]
    ) -> list[tuple[int, int, float]]:
        """The tokens between the rendering before each turn and the one up to it, with their weights."""
        found = []
        for number, one in enumerate(plan.asked):
            before, upto = (
                np.array(each.ids, dtype=np.uint32) for each in encodings[2 * number : 2 * number + 2]
            )
            begin, end = len(before), _shared(tokens, upto)
            closing = upto[end:]  # what the template writes only at the end of a conversation
            is_beginning = np.array_equal(tokens[:begin], before)
            if not is_beginning or end <= begin or not all(map(self._is_special_or_space, closing)):
                _refuse_turn(plan, one, self.tokenizer.decode(closing.tolist()))
            found.append((begin, self._after_end_of_turn(tokens, begin, end), one.weight))
        return found

    def _after_end_of_turn(self, tokens: NDArray[np.uint32], begin: int, end: int) -> int:
        """The end of the trained tokens: after the first special tokens in what closes the turn."""
        first = end
        while first > begin and self._is_special_or_space(tokens[first - 1]):
            first -= 1
        closing = [int(token) in self.tokenizer.special_ids for token in tokens[first:end]]
        if True not in closing:
            return end
        stop = closing.index(True)
        while stop < len(closing) and closing[stop]:
            stop += 1
        return first + stop

    def _is_special_or_space(self, token: int) -> bool:
        token = int(token)
        if token not in self._special_or_space:
            is_space = not self.tokenizer.decode([token]).strip()
            self._special_or_space[token] = is_space or token in self.tokenizer.special_ids
        return self._special_or_space[token]

    @cached_property
    def _special_or_space(self) -> dict[int, bool]:
        return {}


def _shared(one: NDArray[np.uint32], other: NDArray[np.uint32]) -> int:
    """Tokens that both begin with."""
    length = min(len(one), len(other))
    differing = np.flatnonzero(one[:length] != other[:length])
    return int(differing[0]) if len(differing) else length


def _place(where: str, turn: int) -> str:
    return f"{where}, turn {turn + 1} (assistant)"


_HINT = (
    "pass a template that marks the answers with {% generation %} (--template FILE), or train the last turn "
    "only (--train last)"
)


def _require_beginning(before: str, text: str, where: str) -> None:
    if text.startswith(before):
        return
    at = next(
        (index for index, pair in enumerate(zip(before, text, strict=False)) if pair[0] != pair[1]), len(text)
    )
    expected, found = (each[at : at + _SHOWN_CHARACTERS] for each in (before, text))
    fact = (
        "the template renders the turns before differently when this turn follows, so its tokens cannot be "
        f"found: {expected!r} became {found!r}"
    )
    raise DataError(fact, where=where, hint=_HINT)


def _refuse_turn(plan: _Plan, one: _Asked, closing: str) -> None:
    shown = closing[:_SHOWN_CHARACTERS]
    fact = (
        "the tokens of this turn change when later turns follow, so its trained tokens cannot be found"
        f"{f': {shown!r} is missing' if shown.strip() else ''}"
    )
    raise DataError(fact, where=_place(plan.where, one.turn), hint=_HINT)
