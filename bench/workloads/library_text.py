"""The dataset of `bench.parity`: the sources of Python's standard library, a text that every machine has.

Bytes are tokens. Some hundred steps are far from enough to learn it, so the loss keeps falling and never
comes near a floor, where every number format would look the same. Unlike a synthetic grammar it has structure
for every part of a model from the first steps on.
"""

import hashlib
import math
import sysconfig
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from meshwright.bench.random_tokens import RandomTokens
from meshwright.data.write import new_dataset
from meshwright.errors import SpecError

# Folders with character tables, generated files and test data.
LEFT_OUT = (
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "encodings",
    "pydoc_data",
    "lib2to3",
)
NUM_BYTES = 256


def library_files(folder: Path) -> list[Path]:
    """The source files, shuffled by a hash of their path, so that the order is the same everywhere."""
    found = [path for path in folder.rglob("*.py") if not set(path.relative_to(folder).parts) & set(LEFT_OUT)]
    return sorted(found, key=lambda path: hashlib.sha1(str(path.relative_to(folder)).encode()).digest())


def library_documents(num_tokens: int, folder: Path | None = None) -> list[NDArray[np.uint32]]:
    """The files as tokens: byte value plus 1; token 0 ends a document."""
    folder = folder or Path(sysconfig.get_paths()["stdlib"])
    documents: list[NDArray[np.uint32]] = []
    total = 0
    for path in library_files(folder):
        if total >= num_tokens:
            return documents
        documents.append(np.frombuffer(path.read_bytes(), dtype=np.uint8).astype(np.uint32) + 1)
        total += len(documents[-1]) + 1
    if total < num_tokens:
        raise SpecError(
            f"the sources of Python's library have {total} bytes, {num_tokens} are needed",
            where=str(folder),
            hint="use fewer --steps or a smaller --batch",
        )
    return documents


def write_library(folder: Path, *, vocab_size: int, num_tokens: int) -> dict[str, float]:
    """Write a packed dataset of this many tokens; returns its size and its unigram entropy."""
    documents = library_documents(num_tokens)
    with new_dataset(folder, RandomTokens(vocab_size)) as writer:
        writer.append(documents)
        writer.finish([])
    counts = np.bincount(np.concatenate(documents), minlength=NUM_BYTES + 1)
    shares = [count / counts.sum() for count in counts if count]
    return {
        "num_files": len(documents),
        "num_bytes": int(counts.sum()),
        "frequencies": -sum(share * math.log(share) for share in shares),
    }
