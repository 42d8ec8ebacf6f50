"""A packed dataset of random tokens with a Zipf-like distribution, as in text: what a step is timed on."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from meshwright.data.write import new_dataset

DOCUMENT_TOKENS = 1023  # without the end-of-document token


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


def write_random_tokens(folder: Path, *, vocab_size: int, num_tokens: int, seed: int = 0) -> None:
    """Write `num_tokens` tokens; token r has probability proportional to 1 / (r + 10).

    Loss and gradients are then like those at the start of a real training.
    """
    generator = np.random.default_rng(seed)
    cumulated = np.cumsum(1.0 / (np.arange(vocab_size) + 10.0))
    with new_dataset(folder, RandomTokens(vocab_size)) as writer:
        for start in range(0, num_tokens, DOCUMENT_TOKENS << 10):
            count = min(DOCUMENT_TOKENS << 10, num_tokens - start)
            drawn = np.searchsorted(cumulated, generator.random(count) * cumulated[-1])
            boundaries = range(DOCUMENT_TOKENS, count, DOCUMENT_TOKENS)
            writer.append(np.split(drawn.astype(np.uint32), list(boundaries)))
        writer.finish([])
