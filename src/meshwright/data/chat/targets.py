"""Tokens of conversations, and the loss weight of each: which tokens the model is trained to write.

A template with `{% generation %}` says itself what the model writes. For any other template the trained
tokens of an answer are those between two renderings: the turns before it with the generation prompt, and the
turns up to it (prefix rendering). That holds only where both are a prefix of the tokens of the conversation.
A template that rewrites earlier turns (one that removes their thinking) fails this check, and is refused with
the turn.

The end-of-turn token is trained: without it a model does not learn to stop. What the template writes after it
belongs to no turn and is not trained.
"""

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.data.chat.conversation import Completion, Conversation, Sample, WeightedTokens
from meshwright.data.chat.mask_errors import (
    changed_error,
    joined_error,
    place_of,
    rewritten_error,
    unwritten_calls_error,
    unwritten_error,
    ways_out,
)
from meshwright.data.chat.template import ChatTemplate, Rendered
from meshwright.data.chat.turn_ends import TurnEnds
from meshwright.data.chat.values import Messages
from meshwright.data.tokenize import HuggingFaceTokenizer
from meshwright.errors import DataError

Trained = Literal["assistant", "last", "all"]
_SEARCHED_CHARACTERS = 400
_WORD = re.compile(r"\w+")


class Encoded(NamedTuple):
    """The tokens of one sample."""

    tokens: NDArray[np.uint32]
    weights: NDArray[np.float32]
    """Loss weight of each token as a target."""
    last_trained: list[int]
    """The last trained token of each trained turn but spaces: the end-of-turn token, where it is trained."""
    unwritten: frozenset[str] = frozenset()
    """Turns, by role, that the template does not write."""

    @property
    def num_trained(self) -> int:
        """Tokens that are trained; the first token of a document is never a target."""
        return int(np.count_nonzero(self.weights[1:]))


class _Asked(NamedTuple):
    """A trained turn, and the texts that enclose it, from a token on that divides the text in any case.

    Without what is before that token, the work for a conversation does not grow with the square of its turns.
    """

    turn: int
    weight: float
    before: str
    upto: str
    begin: int = 0
    """First character of both in the text of the conversation."""
    divider: int | None = None
    """Which of the text's dividers is there; None: both begin where the text does."""


class _Plan(NamedTuple):
    """A sample whose texts are rendered and not yet encoded."""

    sample: Sample
    where: str
    rendered: Rendered
    asked: list[_Asked]
    divider_ids: list[int]
    """The dividing tokens of the text, in order."""
    unwritten: frozenset[str] = frozenset()

    @property
    def is_tagged(self) -> bool:
        return bool(self.rendered.spans)

    def enclosing(self) -> list[str]:
        return [text for one in self.asked for text in (one.before, one.upto)]

    def from_begin(self) -> "_Plan":
        """The plan with complete texts, for a tokenizer whose dividers are not found."""
        text = self.rendered.text
        asked = [
            _Asked(one.turn, one.weight, text[: one.begin] + one.before, text[: one.begin] + one.upto)
            for one in self.asked
        ]
        return self._replace(asked=asked)


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
        texts = self._encodings_of_texts(ready)
        ready = [
            plan if self._has_dividers(plan, encoding) else plan.from_begin()
            for plan, encoding in zip(ready, texts, strict=True)
        ]
        enclosing = iter(
            self.tokenizer.encodings(
                [text for plan in ready for text in plan.enclosing()], with_offsets=False
            )
        )
        encoded = iter(
            [
                self._encoded_or_refused(plan, [encoding, *(next(enclosing) for _ in plan.enclosing())])
                for plan, encoding in zip(ready, texts, strict=True)
            ]
        )
        return [plan if isinstance(plan, DataError) else next(encoded) for plan in plans]

    def _encodings_of_texts(self, plans: list[_Plan]) -> list[Any]:
        # Only blocks of a template need offsets into the text, which cost time.
        found = {
            is_tagged: iter(
                self.tokenizer.encodings(
                    [plan.rendered.text for plan in plans if plan.is_tagged == is_tagged],
                    with_offsets=is_tagged,
                )
            )
            for is_tagged in (False, True)
        }
        return [next(found[plan.is_tagged]) for plan in plans]

    def _has_dividers(self, plan: _Plan, encoding: Any) -> bool:
        """Whether the tokens of the text have the dividers of the text."""
        if all(one.divider is None for one in plan.asked):
            return True
        tokens = np.array(encoding.ids, dtype=np.uint32)
        return tokens[np.isin(tokens, self.tokenizer.divider_ids)].tolist() == plan.divider_ids

    def _encoded_or_refused(self, plan: _Plan, encodings: list[Any]) -> Encoded | DataError:
        try:
            return self._encoded(plan, encodings)
        except DataError as error:
            return error

    def _planned(self, sample: Sample, where: str) -> _Plan | DataError:
        try:
            if isinstance(sample, Completion):
                asked = [_Asked(0, 1.0, sample.prompt, sample.completion)]
                return _Plan(sample, where, Rendered(sample.prompt + sample.completion, []), asked, [])
            if isinstance(sample, WeightedTokens):
                return _Plan(sample, where, Rendered("", []), [], [])
            return self._rendered(sample, where)
        except DataError as error:
            return error

    def _rendered(self, sample: Conversation, where: str) -> _Plan:
        template, tools = self._required_template(where), sample.tools
        self._require_written(sample, template, where)
        messages, rendered = template.first_rendering(sample.messages, tools=tools, where=where)
        unwritten = _unwritten(sample, rendered.text)
        if template.is_tagged(with_tools=tools is not None):
            return _Plan(sample, where, rendered, [], [], unwritten)
        dividers = self.tokenizer.dividers(rendered.text)
        ends = [end for _, end, _ in dividers]
        asked = []
        for turn, weight in self._weighted_turns(sample):
            place = place_of(where, turn)
            before = self._prompt(messages[:turn], tools, place)
            # Up to the last turn it is the text of the conversation: most have one answer.
            is_last = turn == len(messages) - 1
            upto = rendered if is_last else template.render(messages[: turn + 1], tools=tools, where=place)
            if not rendered.text.startswith(before):
                raise rewritten_error(before, rendered.text, place, self._ways_out(sample, turn))
            number = bisect_right(ends, len(before)) - 1
            begin = dividers[number][0] if number >= 0 else 0
            if number < 0 or not upto.text.startswith(before[:begin]):
                asked.append(_Asked(turn, weight, before, upto.text))
            else:
                asked.append(_Asked(turn, weight, before[begin:], upto.text[begin:], begin, number))
        return _Plan(sample, where, rendered, asked, [token for _, _, token in dividers], unwritten)

    def _require_written(self, sample: Conversation, template: ChatTemplate, where: str) -> None:
        """DataError where a trained answer is only calls of tools, of which the template writes none."""
        if template.names("tool_calls"):
            return
        for turn, weight in self._answer_weights(sample):
            if weight and not sample.turns[turn].text.strip():
                raise unwritten_calls_error(place_of(where, turn))

    def _prompt(self, messages: Messages, tools: Sequence[Any] | None, place: str) -> str:
        """The turns before an answer, as the model is asked."""
        template = self._required_template(place)
        try:
            return template.render(messages, tools=tools, where=place, add_generation_prompt=True).text
        except DataError as error:
            if messages:
                raise
            fact = "the conversation begins with an answer, and the template renders no prompt without turns"
            hint = 'put a turn of the user before it, or mark it with "train": false'
            raise DataError(fact, where=place, hint=hint) from error

    def _ways_out(self, sample: Sample, turn: int) -> str:
        assert isinstance(sample, Conversation) and self.template is not None
        return ways_out(self.template, is_last=turn == sample.answers()[-1])

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
            if weight:  # a block of a template may have a newline after the end of turn
                ends.append(self._end_token(tokens, begin, end))
        last = plan.sample.turns[-1]
        if self.trained == "all" and not ends and last.is_answer and last.weight is None:
            ends.append(self._end_token(tokens, 0, len(tokens)))
        return Encoded(tokens, weights, ends, plan.unwritten)

    def _end_token(self, tokens: NDArray[np.uint32], begin: int, end: int) -> int:
        return int(tokens[self._turn_ends.after(tokens, begin, end) - 1])

    def _completion(self, sample: Completion, encodings: list[Any]) -> Encoded:
        """Prompt, completion and end of document; the prompt has the tokens that it has at inference."""
        joint, prompt, completion = (each.ids for each in encodings)
        if joint[: len(prompt)] != prompt:  # a token reaches from the prompt into the completion
            joint = prompt + self._continued(sample.completion, joint, prompt, completion)
        begin = [] if joint[:1] == self.tokenizer.begin_ids else self.tokenizer.begin_ids
        end = [] if joint[-1:] == [self.tokenizer.eos_id] else [self.tokenizer.eos_id]
        tokens = np.array([*begin, *joint, *end], dtype=np.uint32)
        weights = np.full(len(tokens), float(self.trained == "all"), dtype=np.float32)
        weights[len(begin) + len(prompt) :] = 1.0
        return Encoded(tokens, weights, [self.tokenizer.eos_id])

    def _continued(self, text: str, joint: list[int], prompt: list[int], completion: list[int]) -> list[int]:
        """The tokens of a completion behind those of its prompt.

        Some tokenizers put a space before a text, which belongs to no text that continues another one.
        """
        decode = self.tokenizer.decode_with_special
        leads = ("\n", self.tokenizer.token(self.tokenizer.eos_id) or "")
        found = (completion, *(self.tokenizer.tokens_after(lead, text) for lead in leads))
        same = (each for each in found if each is not None and decode(prompt + each) == decode(joint))
        return next(same, completion)

    def _given(self, sample: WeightedTokens, where: str) -> Encoded:
        size = self.tokenizer.vocab_size
        outside = next((token for token in sample.tokens if not 0 <= token < size), None)
        if outside is not None:
            fact = f"token {outside} is outside the vocabulary"
            hint = f"the tokenizer has the ids 0 to {size - 1}"
            raise DataError(fact, where=where, hint=hint)
        tokens = np.array(sample.tokens, dtype=np.uint32)
        weights = np.array(sample.weights, dtype=np.float32)
        last = [int(tokens[index]) for index in np.flatnonzero(weights)[-1:]]
        return Encoded(tokens, weights, [token for token in last if token in self.tokenizer.special_ids])

    def _tagged_spans(self, plan: _Plan, encoding: Any) -> list[tuple[int, int, float]]:
        """The tokens of `{% generation %}` blocks, with their weights."""
        assert isinstance(plan.sample, Conversation)
        spans = plan.rendered.spans
        weights = self._block_weights(plan, len(spans))
        found = []
        # Not `char_to_token`: of a character with several tokens, such as an emoji, it names only the first.
        firsts, ends = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
        for (begin, end), weight in zip(spans, weights, strict=True):
            inside = np.flatnonzero((firsts < end) & (ends > begin))
            if len(inside):
                found.append((int(inside[0]), int(inside[-1]) + 1, weight))
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
        divided = np.flatnonzero(np.isin(tokens, self.tokenizer.divider_ids))
        for number, one in enumerate(plan.asked):
            start = 0 if one.divider is None else int(divided[one.divider])
            before, upto = (
                np.array(each.ids, dtype=np.uint32) for each in encodings[2 * number : 2 * number + 2]
            )
            begin, shared = start + len(before), _shared(tokens[start:], upto)
            closing = upto[shared:]  # what the template writes only at the end of a conversation
            end, place = start + shared, place_of(plan.where, one.turn)
            if not np.array_equal(tokens[start:begin], before):
                hint = self._ways_out(plan.sample, one.turn)
                raise joined_error(one.upto[len(one.before) :], place, hint)
            if len(one.upto) <= len(one.before):
                raise unwritten_error(place)
            if end <= begin or not all(map(self._turn_ends.is_special_or_space, closing)):
                hint = self._ways_out(plan.sample, one.turn)
                raise changed_error(self.tokenizer.decode(closing.tolist()), place, hint)
            found.append((begin, self._turn_ends.after(tokens, begin, end), one.weight))
        return found

    @cached_property
    def _turn_ends(self) -> TurnEnds:
        return TurnEnds(self.tokenizer, self.template)


def _unwritten(sample: Conversation, text: str) -> frozenset[str]:
    """The roles of turns of which not even a word is in the text, such as `tool turns`.

    Templates may rewrite a turn, so only its longest word is looked for.
    """
    found = set[str]()
    for turn in sample.turns:
        words = _WORD.findall(turn.text[:_SEARCHED_CHARACTERS])
        if words and not turn.is_answer and max(words, key=len) not in text:
            found.add(f"{turn.role} turns")
    return frozenset(found)


def _shared(one: NDArray[np.uint32], other: NDArray[np.uint32]) -> int:
    """Tokens that both begin with."""
    length = min(len(one), len(other))
    differing = np.flatnonzero(one[:length] != other[:length])
    return int(differing[0]) if len(differing) else length
