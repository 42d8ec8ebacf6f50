"""Token datasets: made, packed, ordered and batched, so that a position is one integer.

Every source is random-access, and the order of samples is a pure function of seed, epoch and index.
So a position in the data is the global index of the next sample: it means the same on any number of
ranks, and resuming replays nothing. Only `batches` imports torch.
"""
