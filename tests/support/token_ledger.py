"""A ledger of token batches: a digest per ordered global step, over any number of simulated ranks."""

import hashlib
from typing import Any

import torch

from meshwright.data.batches import Batches, build_batches
from meshwright.data.microbatch import Microbatch
from meshwright.spec import DataSpec


class TokenRanks:
    """The batches of every data-parallel rank of a run, in one process."""

    def __init__(self, spec: DataSpec, num_ranks: int, *, seed: int = 3) -> None:
        self.ranks: list[Batches] = [
            build_batches(
                spec, seed=seed, vocab_size=257, dp_rank=rank, dp_size=num_ranks, dtype=torch.float64
            )
            for rank in range(num_ranks)
        ]

    def step(self) -> str:
        """The digest of the next global batch: sample ids, and every tensor of each row in global order."""
        batches = [next(rank) for rank in self.ranks]
        assert len({batch.sample_ids for batch in batches}) == 1
        parts = zip(*(batch.microbatches for batch in batches), strict=True)
        rows = [row_of(microbatch) for of_ranks in parts for microbatch in of_ranks]
        return hashlib.sha256(repr((batches[0].sample_ids, rows)).encode()).hexdigest()

    def steps(self, count: int) -> list[str]:
        """Digests of the next steps."""
        return [self.step() for _ in range(count)]

    def state(self) -> dict[str, Any]:
        """The state, which is the same on all ranks."""
        states = [rank.state() for rank in self.ranks]
        assert all(state == states[0] for state in states)
        return states[0]

    def restore(self, state: dict[str, Any]) -> None:
        """Continue at a saved position on all ranks."""
        for rank in self.ranks:
            rank.load_state(state)

    def close(self) -> None:
        """Stop reading ahead."""
        for rank in self.ranks:
            rank.close()


def row_of(one: Microbatch) -> list[object]:
    """Tokens, targets, loss weights, positions and documents of a micro-batch of one sequence."""
    offsets = None if one.document_offsets_P is None else one.document_offsets_P.unique().tolist()
    tensors = (one.tokens_BS, one.targets_BS, one.weights_BS, one.positions_BS, one.sequence_weights_B)
    return [offsets, *(tensor.tolist() for tensor in tensors)]
