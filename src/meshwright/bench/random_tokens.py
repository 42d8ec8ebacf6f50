"""A packed dataset of random tokens with a Zipf-like distribution, as in text: what a step is timed on."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from meshwright.data.write import new_dataset

DOCUMENT_TOKENS = 1023  # without the end-of-document token
BLOCK_TOKENS = DOCUMENT_TOKENS << 10
# Lengths of real documents are about lognormal: the mean is 1.6 times the median, and few are 10 times it.
LENGTH_SIGMA = 1.0


class RandomTokens:
    """In the place of a tokenizer: it has a vocabulary and encodes no text."""

    name, hash, eos_id = "random", "0" * 16, 0

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.unsignedinteger]]:
        """Not supported: random tokens have no text."""
        raise NotImplementedError(f"random tokens cannot encode {len(texts)} texts")

    def decode(self, tokens: Iterable[int]) -> str:
        """The token ids as text."""
        return " ".join(map(str, tokens))


def write_random_tokens(
    folder: Path, *, vocab_size: int, num_tokens: int, seed: int = 0, mean_tokens: int | None = None
) -> None:
    """Write `num_tokens` tokens; token r > 0 has probability proportional to 1 / (r + 9); 0 ends documents.

    Loss and gradients are then like those at the start of a real training. Documents have 1023 tokens, or
    `mean_tokens` on average with a heavy tail (lognormal).
    """
    generator = np.random.default_rng(seed)
    cumulated = np.cumsum(1.0 / (np.arange(vocab_size - 1) + 10.0))
    with new_dataset(folder, RandomTokens(vocab_size)) as writer:
        for start in range(0, num_tokens, BLOCK_TOKENS):
            count = min(BLOCK_TOKENS, num_tokens - start)
            drawn = 1 + np.searchsorted(cumulated, generator.random(count) * cumulated[-1])
            writer.append(np.split(drawn.astype(np.uint32), document_ends(count, mean_tokens, seed + start)))
        writer.finish([])


def document_ends(count: int, mean_tokens: int | None, seed: int) -> NDArray[np.int64]:
    """Where the documents of `count` tokens end, except the last."""
    if mean_tokens is None:
        return np.arange(DOCUMENT_TOKENS, count, DOCUMENT_TOKENS)
    # One token of the mean is the end-of-document token, which the writer adds.
    centre = np.log(max(1, mean_tokens - 1)) - LENGTH_SIGMA**2 / 2
    drawn = np.random.default_rng(seed).lognormal(centre, LENGTH_SIGMA, size=8 * count // mean_tokens + 64)
    ends = np.cumsum(np.maximum(1, np.rint(drawn)).astype(np.int64))
    return ends[ends < count]
