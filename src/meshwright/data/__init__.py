"""Token datasets: generated or packed, shuffled and batched, with one integer as the position.

Every source is random-access, and the order of samples is a pure function of seed, epoch and index.
So a position in the data is the global index of the next sample: it means the same on any number of
ranks, and a resume skips no samples by reading them. Only `batches` imports torch.
"""
