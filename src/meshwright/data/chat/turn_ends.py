"""Where a turn ends in tokens: after its end-of-turn token, before what the template writes behind that."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from meshwright.data.chat.template import ChatTemplate
from meshwright.data.tokenize import HuggingFaceTokenizer
from meshwright.errors import DataError

_PROBE = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})


@dataclass(frozen=True)
class TurnEnds:
    """The ends of the turns that a template writes."""

    tokenizer: HuggingFaceTokenizer
    template: ChatTemplate | None

    def after(self, tokens: NDArray[np.uint32], begin: int, end: int) -> int:
        """The end of a turn in these tokens: after the end-of-turn token, in whatever closes the turn.

        An answer or a call of a tool may end with special tokens too: the usual end is looked for first.
        """
        first = self._closing(tokens, begin, end)
        closing, usual = [int(token) for token in tokens[first:end]], self._usual
        for at in range(len(closing) - len(usual), -1, -1):
            if usual and closing[at : at + len(usual)] == usual:
                return first + at + len(usual)
        return self._first_special(closing, first)

    def is_special_or_space(self, token: int) -> bool:
        """Whether a token is no text."""
        token = int(token)
        if token not in self._known:
            is_space = not self.tokenizer.decode([token]).strip()
            self._known[token] = is_space or token in self.tokenizer.special_ids
        return self._known[token]

    def _closing(self, tokens: NDArray[np.uint32], begin: int, end: int) -> int:
        first = end
        while first > begin and self.is_special_or_space(tokens[first - 1]):
            first -= 1
        return first

    def _first_special(self, closing: list[int], first: int) -> int:
        """The end of the first special tokens in what closes a turn; of all of it where there are none."""
        special = [token in self.tokenizer.special_ids for token in closing]
        if True not in special:
            return first + len(closing)
        stop = special.index(True)
        while stop < len(special) and special[stop]:
            stop += 1
        return first + stop

    @cached_property
    def _usual(self) -> list[int]:
        """The special tokens behind an answer that is one word; none where the template refuses that."""
        try:
            text = self.template.render(_PROBE, tools=None, where="").text if self.template else ""
        except DataError:
            return []
        [tokens] = self.tokenizer.encode([text])
        first = self._closing(tokens, 0, len(tokens))
        closing = [int(token) for token in tokens[first:]]
        end = self._first_special(closing, 0)
        return [token for token in closing[:end] if token in self.tokenizer.special_ids]

    @cached_property
    def _known(self) -> dict[int, bool]:
        return {}
