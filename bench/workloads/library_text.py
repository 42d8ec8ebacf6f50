"""What the runs of bench/parity.py learn: real text that every machine has, the sources of Python's library.

Bytes are tokens. Some hundred steps are far from enough to learn it, so that the loss falls all the time and
never comes near a floor, where every number format would look the same; and unlike a made-up grammar it has
something for every part of a model to find from the first steps on.
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

# Tables of characters, generated files and tests of other kinds than code.
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
    """Sources in an order that mixes them, the same wherever the library is."""
    found = [path for path in folder.rglob("*.py") if not set(path.relative_to(folder).parts) & set(LEFT_OUT)]
    return sorted(found, key=lambda path: hashlib.sha1(str(path.relative_to(folder)).encode()).digest())


def library_documents(num_tokens: int, folder: Path | None = None) -> list[NDArray[np.uint32]]:
    """Files as tokens, one more than their bytes: 0 is the end of a document."""
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
            f"the sources of Python's library have {total} bytes, {num_tokens} are asked for",
            where=str(folder),
            hint="fewer --steps, or a smaller --batch",
        )
    return documents


def write_library(folder: Path, *, vocab_size: int, num_tokens: int) -> dict[str, float]:
    """A packed dataset of so many tokens; its size, and the loss of who knows frequencies alone."""
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
