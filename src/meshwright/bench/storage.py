"""Reading data and saving state: batches per second of our loader, bytes per second of our checkpoints.

The world of ranks must be joined: saving agrees over it, also when it is one rank.
"""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from meshwright.bench.random_tokens import write_random_tokens
from meshwright.bench.timing import timing_of, wait_for
from meshwright.checkpoint.load import load_tensors, read_manifest, verify_files
from meshwright.checkpoint.save import save_checkpoint
from meshwright.data.batches import build_batches
from meshwright.spec import DataSpec

Row = dict[str, Any]
VOCAB_SIZE = 50304
_FEWEST_BATCHES = 16
# Batches that lie ready when the first is asked for; after them the loader's own speed shows.
_MADE_AHEAD = 4


def data_rows(
    device: torch.device,
    *,
    seconds: float,
    path: Path | None = None,
    sequences: tuple[int, ...] = (1024, 4096),
) -> Iterator[Row]:
    """Tokens per second of batches that reach the device; of random tokens when no dataset is named."""
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
    for _ in range(_MADE_AHEAD):
        next(batches)
    times: list[float] = []
    while sum(times) < seconds or len(times) < _FEWEST_BATCHES:
        started_at = time.perf_counter()
        next(batches)
        wait_for(device)
        times.append(time.perf_counter() - started_at)
    batches.close()
    mean = sum(times) / len(times)  # batches are made ahead, so single times say little
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
    """Save, verify and load of random tensors under `folder`, which is emptied again."""
    for size in sizes:
        tensors = {
            f"layer.{index}": torch.randn(size // 32, device=device) for index in range(8)
        }  # 8 tensors of 4-byte numbers
        with tempfile.TemporaryDirectory(prefix="meshwright-bench-", dir=folder) as parent:
            yield from _checkpoint_rows(Path(parent), tensors, size, device)


def _checkpoint_rows(root: Path, tensors: dict[str, Any], size: int, device: torch.device) -> Iterator[Row]:
    wait_for(device)
    started_at = time.perf_counter()
    saved = save_checkpoint(root, step=1, tensors=tensors, facts={})
    yield _checkpoint_row("save", size, time.perf_counter() - started_at)
    started_at = time.perf_counter()
    verify_files(saved, read_manifest(saved))
    yield _checkpoint_row("verify", size, time.perf_counter() - started_at)
    started_at = time.perf_counter()
    load_tensors(saved, tensors)
    wait_for(device)
    yield _checkpoint_row("load", size, time.perf_counter() - started_at)


def _checkpoint_row(what: str, size: int, seconds: float) -> Row:
    return {"what": what, "bytes": size, "seconds": seconds, "megabytes_per_second": size / seconds / 1e6}
