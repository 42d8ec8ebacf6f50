"""What a step computes on: micro-batches of one rank as tensors, and the batch that they form."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshwright.data.samples import PADDING
from meshwright.errors import DataError


class Microbatch(NamedTuple):
    """One forward and backward of one rank.

    A pipeline's schedule concatenates the tensors of several micro-batches along dim 0 and splits them again.
    """

    tokens_BS: Tensor
    """Input tokens, int64."""
    targets_BS: Tensor
    """Target tokens, int64: the next token of each token."""
    weights_BS: Tensor
    """Loss weights: 1 / target tokens of the global batch where the target counts, else 0; a source with loss
    weights of its own has weight / sum of the weights of the global batch."""
    num_targets: int | None
    """Targets that count in the loss, or more; None where the tokens are sharded over cp."""
    positions_BS: Tensor
    """Positions, int64, from 0 at the start of the row and, with separate documents, of each document."""
    document_offsets_P: Tensor | None
    """Offsets of separate documents (document masking, varlen), int32, over the B x S tokens: a document is
    the tokens from one entry to the next. Of one length in all micro-batches of a batch: entries at the end
    repeat B x S. None for joined documents."""
    longest_document: int | None
    """Tokens of the longest document, or more; None for joined documents."""
    sequence_weights_B: Tensor
    """1 / sequences of the global batch, 0 for a padding row: for losses that average over sequences."""
    answers_BS: Tensor | None = None
    """Preference pairs: the answer of each target in its row, int64; 2 p is the chosen and 2 p + 1 the
    rejected one of pair p. `weights_BS` are then not divided by anything."""
    pairs_BPF: Tensor | None = None
    """Preference pairs of each row: weight (1 / pairs of the global batch, 0 for padding), and the reference
    log-probs of the chosen and the rejected answer."""
    dropout_keys_BS: Tensor | None = None
    """Keys of the tokens' dropout masks, int64; None where no adapter has dropout, and in evaluation."""

    def each(self, change: Callable[[Tensor], Tensor]) -> "Microbatch":
        """The micro-batch with `change` applied to every tensor."""
        return Microbatch(
            tokens_BS=change(self.tokens_BS),
            targets_BS=change(self.targets_BS),
            weights_BS=change(self.weights_BS),
            num_targets=self.num_targets,
            positions_BS=change(self.positions_BS),
            document_offsets_P=(None if self.document_offsets_P is None else change(self.document_offsets_P)),
            longest_document=self.longest_document,
            sequence_weights_B=change(self.sequence_weights_B),
            answers_BS=None if self.answers_BS is None else change(self.answers_BS),
            pairs_BPF=None if self.pairs_BPF is None else change(self.pairs_BPF),
            dropout_keys_BS=None if self.dropout_keys_BS is None else change(self.dropout_keys_BS),
        )


@dataclass(frozen=True)
class Batch:
    """One rank's part of a global batch, and counts of the global batch."""

    microbatches: tuple[Microbatch, ...]
    num_tokens: int
    """Target tokens of the global batch that count in the loss."""
    num_sequences: int
    """Sequences of the global batch without padding rows."""
    sample_ids: tuple[int, ...]
    """Samples of the global batch, in global order."""

    @property
    def num_positions(self) -> int:
        """Positions of the global batch, whether or not their targets count."""
        return self.num_sequences * self.microbatches[0].tokens_BS.shape[1]


@dataclass(frozen=True)
class BatchSharding:
    """How a global batch is split over ranks and micro-batches, and the device and dtype of its tensors."""

    batch_sequences: int
    microbatch_sequences: int
    dp_rank: int
    dp_size: int
    device: torch.device
    dtype: torch.dtype
    """Dtype of the loss weights."""

    def __post_init__(self) -> None:
        rows = self.microbatch_sequences * self.dp_size
        if self.batch_sequences % rows:
            raise DataError(
                f"batch_sequences={self.batch_sequences} is not a multiple of "
                f"microbatch_sequences={self.microbatch_sequences} x {self.dp_size} data-parallel ranks",
                where="data.batch_sequences",
                hint=f"use {-(-self.batch_sequences // rows) * rows}, or another microbatch or rank count",
            )

    def local(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """This rank's sample ids, micro-batch after micro-batch, padded with PADDING."""
        rows = np.full(self.batch_sequences, PADDING, dtype=np.int64)
        rows[: len(ids)] = ids
        return self._own(rows)

    def local_indices(self) -> NDArray[np.int64]:
        """The indices in the global batch of this rank's rows, micro-batch after micro-batch."""
        return self._own(np.arange(self.batch_sequences, dtype=np.int64))

    def _own(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        return rows.reshape(-1, self.dp_size, self.microbatch_sequences)[:, self.dp_rank].reshape(-1)
