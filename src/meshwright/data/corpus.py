"""The generated corpus: short stories whose later sentences depend on their first ones.

Each document is one day in a village. Early sentences introduce who lives there, what they own and how
many; later ones give things away and count again, sing the same refrain a second time, open boxes inside
boxes and close them in the opposite order, and at the end ask who owned what. So a model learns to spell
after a little training, learns grammar after some more (he and she, one apple was, two apples were), and
gets the facts right only if it attends far back.

`unigram_entropy` is the loss of the best model that ignores context: one that knows only how often each token
occurs. A lower loss on text that was not trained on shows that the model learned structure.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from meshwright.data.sources import TokensInMemory, in_parts, token_dtype
from meshwright.data.tokenize import ByteTokenizer
from meshwright.spec import SyntheticSpec

# Part of the fingerprint: a change of the grammar is another corpus.
_GRAMMAR_VERSION = 1

_SHE = ("Mira", "Ada", "Wren", "Lotte", "Iris", "Freya", "Olive", "Tamsin")
_HE = ("Tobin", "Jonas", "Edgar", "Felix", "Bruno", "Casper", "Hugo", "Silas")
_TRADES = ("baker", "miller", "weaver", "fisher", "potter", "shepherd", "glazier", "beekeeper")
_PLACES = ("Otterby", "Fernhill", "Saltmarsh", "Thistledown", "Greywater", "Larkrise")
_COLOURS = ("red", "blue", "green", "golden", "silver", "white", "black")
_TREASURES = ("kite", "lantern", "fiddle", "key", "cloak", "drum", "boat", "clock")
_FRUITS = (("apple", "apples"), ("pear", "pears"), ("plum", "plums"), ("fig", "figs"), ("nut", "nuts"))
_WEATHERS = ("sunny", "foggy", "windy", "snowy", "rainy", "quiet")
_ROOMS = ("mill", "attic", "cellar", "barn", "boathouse", "chapel")
_BOXES = ("chest", "basket", "box", "jar", "purse")
_NUMBERS = ("none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven")
_MOST = len(_NUMBERS) - 1
_RHYMES = (("hill", "still"), ("sea", "free"), ("night", "bright"), ("glade", "unafraid"), ("sky", "high"))


_T = TypeVar("_T")


@dataclass
class _Dice:
    """Random choices of one document, from numbers drawn at once: a call per choice would be slow."""

    draws: list[float]
    used: int = 0

    def below(self, limit: int) -> int:
        value = int(self.draws[self.used % len(self.draws)] * limit)
        self.used += 1
        return value

    def pick(self, options: Sequence[_T]) -> _T:
        return options[self.below(len(options))]

    def some(self, options: Sequence[_T], count: int) -> list[_T]:
        """`count` different options, in random order."""
        left = list(options)
        return [left.pop(self.below(len(left))) for _ in range(count)]


@dataclass
class _Villager:
    """A person in a story, with their current belongings."""

    name: str
    trade: str
    pronoun: str
    treasure: str
    num_fruits: int = 0

    @property
    def possessive(self) -> str:
        return "her" if self.pronoun == "she" else "his"


@dataclass
class _Story:
    """One document while it is written."""

    dice: _Dice
    villagers: list[_Villager]
    place: str
    fruit: tuple[str, str]
    lines: list[list[str]] = field(default_factory=list)

    def paragraph(self) -> None:
        self.lines.append([])

    def say(self, sentence: str) -> None:
        self.lines[-1].append(sentence[0].upper() + sentence[1:])

    def counted(self, number: int) -> str:
        word = _NUMBERS[number] if number else "no"
        return f"{word} {self.fruit[number != 1]}"

    def text(self) -> str:
        return "\n".join(" ".join(line) for line in self.lines) + "\n"


def document_text(seed: int, index: int) -> str:
    """Document `index` of the corpus of `seed`; it does not depend on any other document."""
    dice = _Dice(np.random.default_rng([seed, index]).random(128).tolist())
    story = _Story(dice, _villagers(dice), dice.pick(_PLACES), dice.pick(_FRUITS))
    _tell_opening(story)
    song = _compose(story)
    _tell_song(story, story.villagers[0], song)
    story.paragraph()
    for _ in range(2 + dice.below(3)):
        dice.pick((_tell_gift, _tell_gift, _tell_find, _tell_swap))(story)
    _tell_boxes(story)
    _tell_song(story, story.villagers[-1], song)
    _tell_questions(story)
    _tell_ending(story)
    return story.text()


def documents(spec: SyntheticSpec) -> Iterator[str]:
    """Every document of the corpus, in order."""
    return (document_text(spec.seed, index) for index in range(spec.num_documents))


def generated_tokens(spec: SyntheticSpec) -> TokensInMemory:
    """The corpus as byte tokens, with an end after each document."""
    return _generated(spec.num_documents, spec.seed)


@functools.lru_cache(maxsize=2)  # training and evaluation both need the corpus of a run
def _generated(num_documents: int, seed: int) -> TokensInMemory:
    tokenizer = ByteTokenizer()
    dtype, eos = token_dtype(tokenizer.vocab_size), [tokenizer.eos_id]
    stories = tokenizer.encode([document_text(seed, index) for index in range(num_documents)])
    ends = np.cumsum([len(story) + 1 for story in stories], dtype=np.int64)
    tokens = np.concatenate([part for story in stories for part in (story, eos)]).astype(dtype)
    name = f"generated corpus ({num_documents} documents, seed {seed})"
    fingerprint = f"stories-{_GRAMMAR_VERSION}-{num_documents}-{seed}"
    return TokensInMemory(name, tokens, ends, tokenizer.vocab_size, fingerprint)


def unigram_entropy(tokens: NDArray[np.unsignedinteger]) -> float:
    """Nats per token of the best prediction that ignores context; see the docstring of this module."""
    return entropy_of(token_counts(tokens))


def entropy_of(counts: NDArray[np.int64]) -> float:
    """Nats per token when token t occurs counts[t] times."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def token_counts(tokens: NDArray[np.unsignedinteger]) -> NDArray[np.int64]:
    """Number of occurrences of each token; one pass in chunks, so a large file needs little memory."""
    counts = np.zeros(1, dtype=np.int64)
    for part in in_parts(tokens):
        found = np.bincount(part, minlength=len(counts))
        found[: len(counts)] += counts
        counts = found
    return counts


def _villagers(dice: _Dice) -> list[_Villager]:
    count = 2 + dice.below(2)
    people = [(name, "she") for name in _SHE] + [(name, "he") for name in _HE]
    chosen, trades = dice.some(people, count), dice.some(_TRADES, count)
    treasures = [f"{dice.pick(_COLOURS)} {thing}" for thing in dice.some(_TREASURES, count)]
    return [
        _Villager(name, trade, pronoun, treasure, num_fruits=2 + dice.below(5))
        for (name, pronoun), trade, treasure in zip(chosen, trades, treasures, strict=True)
    ]


def _tell_opening(story: _Story) -> None:
    story.paragraph()
    story.say(f"It was a {story.dice.pick(_WEATHERS)} morning in {story.place}.")
    for one in story.villagers:
        story.say(f"{one.name} the {one.trade} had a {one.treasure} and {story.counted(one.num_fruits)}.")


def _compose(story: _Story) -> str:
    first, second = story.dice.pick(_RHYMES)
    thing = story.villagers[0].treasure
    return f'"Fly, my {thing}, fly to the {first}; {thing}, sing to me, sing and be {second}."'


def _tell_song(story: _Story, singer: _Villager, song: str) -> None:
    story.paragraph()
    story.say(f"{singer.name} sang the song of {story.place}: {song}")


def _tell_gift(story: _Story) -> None:
    giver, taker = story.dice.some(story.villagers, 2)
    most = min(giver.num_fruits, _MOST - taker.num_fruits)
    if most < 1:
        return
    amount = 1 + story.dice.below(most)
    story.say(f"{giver.name} gave {taker.name} {story.counted(amount)}.")
    left, total = giver.num_fruits - amount, taker.num_fruits + amount
    less = f"{_NUMBERS[giver.num_fruits]} less {_NUMBERS[amount]} is {_NUMBERS[left]}"
    more = f"{_NUMBERS[taker.num_fruits]} and {_NUMBERS[amount]} is {_NUMBERS[total]}"
    giver.num_fruits, taker.num_fruits = left, total
    story.say(f"{less}, so {giver.pronoun} had {story.counted(left)} left.")
    story.say(f"{more}, so {taker.name} had {story.counted(total)}.")


def _tell_find(story: _Story) -> None:
    finder = story.dice.pick(story.villagers)
    amount = 1 + story.dice.below(3)
    total = finder.num_fruits + amount
    if total > _MOST:
        return
    verb, them = ("was", "it") if amount == 1 else ("were", "them")
    more = f"{_NUMBERS[finder.num_fruits]} and {_NUMBERS[amount]} is {_NUMBERS[total]}"
    finder.num_fruits = total
    place = story.dice.pick(_ROOMS)
    story.say(f"there {verb} {story.counted(amount)} behind the {place}, and {finder.name} found {them}.")
    story.say(f"{more}, so {finder.pronoun} had {story.counted(total)}.")


def _tell_swap(story: _Story) -> None:
    one, other = story.dice.some(story.villagers, 2)
    story.say(f"{one.name} gave {other.name} the {one.treasure} and got the {other.treasure} for it.")
    one.treasure, other.treasure = other.treasure, one.treasure


def _tell_boxes(story: _Story) -> None:
    """Add boxes in boxes, closed in the opposite order: brackets that must balance."""
    finder, room = story.dice.pick(story.villagers), story.dice.pick(_ROOMS)
    boxes = story.dice.some(_BOXES, 2 + story.dice.below(3))
    inside = "".join(f" (in the {outer} lay a {inner}" for outer, inner in pairwise(boxes))
    story.paragraph()
    story.say(f"In the {room} stood a {boxes[0]}{inside}{')' * (len(boxes) - 1)}.")
    opened = ", ".join(f"opened the {box}" for box in boxes)
    closed = ", ".join(f"closed the {box}" for box in reversed(boxes))
    story.say(f"{finder.name} {opened}, hid {finder.possessive} {finder.treasure}, {closed}, and laughed.")


def _tell_questions(story: _Story) -> None:
    """Add questions whose answers are in the text already, some of them changed since."""
    story.paragraph()
    owner, counter, worker = (story.dice.pick(story.villagers) for _ in range(3))
    story.say(f"who had the {owner.treasure} that night? {owner.name} the {owner.trade}.")
    story.say(
        f"how many {story.fruit[1]} had {counter.name}? {story.counted(counter.num_fruits).capitalize()}."
    )
    story.say(f"and who was the {worker.trade}? {worker.name} was.")


def _tell_ending(story: _Story) -> None:
    names = [one.name for one in story.villagers]
    story.paragraph()
    story.say(f"so {', '.join(names[:-1])} and {names[-1]} went home. Good night, {story.place}.")
