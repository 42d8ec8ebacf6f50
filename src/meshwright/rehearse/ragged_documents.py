"""Random documents of uneven lengths, so that their boundaries fall anywhere in a sequence."""

from pathlib import Path

import numpy as np

from meshwright.data.tokenize import Tokenizer
from meshwright.data.write import new_dataset

# For sequences of 16 tokens: shorter than one, longer than two, of one token, and exactly as long.
DOCUMENT_LENGTHS = (1, 7, 40, 3, 16, 2, 23, 5)


def write_ragged(target: Path, tokenizer: Tokenizer, *, num_sequences: int, sequence_length: int) -> None:
    """A packed dataset that holds exactly this many sequences."""
    generator = np.random.default_rng(7)
    missing = num_sequences * sequence_length + 1
    documents = []
    for length in (DOCUMENT_LENGTHS[i % len(DOCUMENT_LENGTHS)] for i in range(missing)):
        length = min(length, missing - 1)
        documents.append(generator.integers(0, tokenizer.eos_id, length).astype(np.uint16))
        missing -= length + 1
        if missing <= 1:
            break
    with new_dataset(target, tokenizer) as writer:
        writer.append(documents)
        writer.finish([])
