"""Data loading and checkpoints: tokens per second of the loader, bytes per second of saving and loading.

The world of ranks must be joined, also when it is one rank: saving a checkpoint is collective.
"""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from meshwright.bench.random_tokens import write_random_tokens
from meshwright.bench.timing import synchronize, timing_of
from meshwright.checkpoint.load import load_tensors, read_manifest, verify_files
from meshwright.checkpoint.save import save_checkpoint
from meshwright.data.batches import build_batches
from meshwright.spec import DataSpec

Row = dict[str, Any]
VOCAB_SIZE = 50304
_FEWEST_BATCHES = 16
# Prefetched batches, which are ready when the first is asked for; after them the loader's own speed shows.
_PREFETCHED = 4


def data_rows(
    device: torch.device,
    *,
    seconds: float,
    path: Path | None = None,
    sequences: tuple[int, ...] = (1024, 4096),
) -> Iterator[Row]:
    """Tokens per second that reach the device, from a dataset or from random tokens."""
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as parent:
        folder = path or Path(parent) / "tokens"
        if path is None:
            write_random_tokens(folder, vocab_size=VOCAB_SIZE, num_tokens=1 << 21)
        for sequence in sequences:
            for documents in ("joined", "separate"):
                spec = DataSpec(
                    path=str(folder),
                    sequence_length=sequence,
                    batch_sequences=8,
                    microbatch_sequences=8,
                    documents=documents,
                )
                yield _data_row(spec, device, seconds)


def _data_row(spec: DataSpec, device: torch.device, seconds: float) -> Row:
    batches = build_batches(spec, seed=0, vocab_size=1 << 31, device=device)
    for _ in range(_PREFETCHED):
        next(batches)
    times: list[float] = []
    while sum(times) < seconds or len(times) < _FEWEST_BATCHES:
        started_at = time.perf_counter()
        next(batches)
        synchronize(device)
        times.append(time.perf_counter() - started_at)
    batches.close()
    mean = sum(times) / len(times)  # batches are prefetched, so the time of a single one means little
    return {
        "sequence": spec.sequence_length,
        "documents": spec.documents,
        "batch_tokens": spec.batch_tokens,
        "seconds": mean,
        "spread": timing_of(times).spread,
        "tokens_per_second": spec.batch_tokens / mean,
    }


def checkpoint_rows(
    device: torch.device, *, folder: Path, sizes: tuple[int, ...] = (1 << 24, 1 << 28)
) -> Iterator[Row]:
    """Save, verify and load random tensors in `folder`; the files are removed afterwards."""
    for size in sizes:
        tensors = {
            f"layer.{index}": torch.randn(size // 32, device=device) for index in range(8)
        }  # 8 tensors of 4-byte numbers
        with tempfile.TemporaryDirectory(prefix="meshwright-bench-", dir=folder) as parent:
            yield from _checkpoint_rows(Path(parent), tensors, size, device)


def _checkpoint_rows(root: Path, tensors: dict[str, Any], size: int, device: torch.device) -> Iterator[Row]:
    synchronize(device)
    started_at = time.perf_counter()
    saved = save_checkpoint(root, step=1, tensors=tensors, facts={})
    yield _checkpoint_row("save", size, time.perf_counter() - started_at)
    started_at = time.perf_counter()
    verify_files(saved, read_manifest(saved))
    yield _checkpoint_row("verify", size, time.perf_counter() - started_at)
    started_at = time.perf_counter()
    load_tensors(saved, tensors)
    synchronize(device)
    yield _checkpoint_row("load", size, time.perf_counter() - started_at)


def _checkpoint_row(what: str, size: int, seconds: float) -> Row:
    return {"what": what, "bytes": size, "seconds": seconds, "megabytes_per_second": size / seconds / 1e6}
