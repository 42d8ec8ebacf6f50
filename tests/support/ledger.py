"""A ledger of what a loader hands out: provenance per sample, a digest per ordered global step."""

import functools
import hashlib
from typing import Any

import numpy as np

from meshwright.data.loader import Loader, open_loader
from meshwright.data.records import KEY, Record, RecordsInMemory

Provenance = tuple[str, bytes, int]
"""Key, content and a random number of the sample's generator."""


@functools.cache
def words(name: str, count: int, *, seed: int = 0) -> RecordsInMemory:
    """Records with heavy-tailed lengths and keys 0 ... count - 1."""
    rng = np.random.default_rng(seed)
    lengths = np.minimum(1 + rng.pareto(1.2, count) * 4, 60).astype(int)
    records = [
        {KEY: f"{number:04d}", name: np.arange(length, dtype=np.int64)}
        for number, length in enumerate(lengths)
    ]
    return RecordsInMemory(name, records, name)


def provenance(record: Record, rng: np.random.Generator) -> Provenance:
    """What a sample is made of, with one draw of its own generator (augmentation)."""
    content = b"|".join(
        f"{key}={np.asarray(value).tobytes().hex()}".encode() for key, value in record.items()
    )
    return str(record[KEY]), content, int(rng.integers(2**62))


class Ranks:
    """A loader for every data-parallel rank, in one process: hands out ordered global batches."""

    def __init__(self, sources: Any, num_ranks: int, **keywords: Any) -> None:
        self.loaders: list[Loader] = [
            open_loader(
                sources, transform=provenance, collate=list, dp_rank=rank, dp_size=num_ranks, **keywords
            )
            for rank in range(num_ranks)
        ]

    def step(self) -> list[Provenance]:
        """The next global batch in order, without fillers; empty at the end."""
        found: list[Provenance] = []
        for loader in self.loaders:
            batch = next(loader, [])
            if loader.is_counted:
                found += [one for part in batch for one in (part if isinstance(part, list) else [part])]
        return found

    def state(self) -> dict[str, Any]:
        """The state, which is the same on all ranks."""
        states = [loader.state() for loader in self.loaders]
        assert all(state == states[0] for state in states)
        return states[0]

    def restore(self, state: dict[str, Any]) -> None:
        for loader in self.loaders:
            loader.restore(state)

    def close(self) -> None:
        for loader in self.loaders:
            loader.close()


def digest(batch: list[Provenance]) -> str:
    """The digest of an ordered global batch."""
    return hashlib.sha256(repr(batch).encode()).hexdigest()


def ledger(ranks: Ranks, num_steps: int) -> list[str]:
    """Digests of the next steps."""
    return [digest(ranks.step()) for _ in range(num_steps)]
