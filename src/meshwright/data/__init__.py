"""Datasets: tokens and records of any format, blended, packed, shuffled and batched, with an exact position.

Every source is random-access, and the order of samples is a pure function of seed, epoch and index.
So a position in the data is the global index of the next sample: it means the same on any number of
ranks, and a resume skips no samples by reading them.

stream          the samples of a run and their order: blend, packing, shuffle, holdout
batches         micro-batches of one data-parallel rank, on its device
record_plan     which records come when; loader reads them, in threads or worker processes
record_file     the sources of a records file (YAML), and what they resolve to
record_sets     joins, parts and splits of record sources; readers/ has one file per format

Only batches, microbatch, local_batch, loader and token_loader import torch.
"""
