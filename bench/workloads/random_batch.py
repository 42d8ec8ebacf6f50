"""A batch of random tokens that is on the device already, for programs that measure without a data loader."""

import torch

from meshwright.data.batches import Batch, Microbatch
from meshwright.spec import RunSpec


def random_batch(run: RunSpec, device: torch.device) -> Batch:
    """One step's batch; token r has probability proportional to 1 / (r + 10), as in `random_tokens`."""
    data, vocab_size = run.data, run.model.vocab_size
    odds_V = 1.0 / (torch.arange(vocab_size, device=device, dtype=torch.float64) + 10.0)
    cumulated_V = odds_V.cumsum(0) / odds_V.sum()
    shape = (data.microbatch_sequences, data.sequence_length)

    def microbatch() -> Microbatch:
        uniform = torch.rand((shape[0], shape[1] + 1), device=device, dtype=torch.float64)
        ids = torch.searchsorted(cumulated_V, uniform).clamp(max=vocab_size - 1)
        return Microbatch(
            tokens_BS=ids[:, :-1].contiguous(),
            targets_BS=ids[:, 1:].contiguous(),
            weights_BS=torch.full(shape, 1.0 / data.batch_tokens, device=device),
            num_targets=None,
            positions_BS=torch.arange(shape[1], device=device).expand(shape).contiguous(),
            document_offsets_P=None,
            longest_document=None,
            sequence_weights_B=torch.full(shape[:1], 1.0 / data.batch_sequences, device=device),
        )

    microbatches = tuple(microbatch() for _ in range(run.accumulation))
    sample_ids = tuple(range(data.batch_sequences))
    return Batch(microbatches, data.batch_tokens, data.batch_sequences, sample_ids)
