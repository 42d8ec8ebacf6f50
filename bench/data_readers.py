"""One rank reads for two tp ranks, or each reads for itself: CPU time, and the time to broadcast."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench import data_corpora

from meshwright.data.decode import decode_image
from meshwright.data.local_batch import read_local_batch
from meshwright.data.microbatch import BatchSharding
from meshwright.data.order import SampleOrder
from meshwright.data.readers.tar import TarShards
from meshwright.data.stream import open_stream
from meshwright.mesh import build_mesh
from meshwright.modules.reading_group import ReadingGroup
from meshwright.rehearse.rank_pool import RankPool, this_world
from meshwright.spec import DataSpec, ParallelSpec

CPU = torch.device("cpu")
NUM_BATCHES = 30


def readers_part(work: Path, rounds: int) -> str:
    """A table of the CPU time that two tp ranks take together for a batch, by who reads it."""
    images = str(data_corpora.image_shards(work / "images"))
    tokens = str(data_corpora.token_dataset(work / "tokens"))
    lines = ["## Two tp ranks and one batch: who reads\n"]
    lines += ["| batch | each rank reads | one reads and broadcasts | wait for it |", "|---|---|---|---|"]
    with RankPool(max_ranks=2) as pool:
        for title, kind, folder in (
            ("64 JPEG images, decoded to 224 x 224 (9.6 MB)", "images", images),
            ("8 sequences of 8192 tokens from a memory map", "tokens", tokens),
        ):
            both = [min(_cost(pool, kind, folder, one) for _ in range(rounds)) for one in (False, True)]
            cells = [f"{cpu * 1e3:.2f} ms CPU" for cpu, _ in both]
            lines.append(f"| {title} | {cells[0]} | {cells[1]} | {both[1][1] * 1e3:.2f} ms |")
    return "\n".join([*lines, ""])


def _cost(pool: RankPool, kind: str, folder: str, one: bool) -> tuple[float, float]:  # noqa: FBT001
    """(CPU seconds of both ranks, seconds that the second rank waits) per batch."""
    found = pool.run(_read, 2, kind, folder, one)
    return sum(cpu for cpu, _ in found), found[1][1]


def _read(kind: str, folder: str, one: bool) -> tuple[float, float]:  # noqa: FBT001
    mesh = build_mesh(ParallelSpec(tp=2), this_world())
    group = ReadingGroup(mesh, has_one_reader=one)
    read = _images(folder) if kind == "images" else _tokens(folder)
    group.share(lambda: read(0))
    cpu_at, wall = _cpu(), 0.0
    for number in range(1, NUM_BATCHES + 1):
        content = read(number) if group.reads else None
        group.share(int)  # the broadcast alone is waited for: reading is ahead of the step
        asked_at = time.perf_counter()
        group.share(lambda content=content: content)
        wall += time.perf_counter() - asked_at
    return (_cpu() - cpu_at) / NUM_BATCHES, wall / NUM_BATCHES


def _images(folder: str) -> Callable[[int], Any]:
    source = TarShards(Path(folder))
    order = SampleOrder(len(source), seed=0)

    def read(number: int) -> torch.Tensor:
        ids = order.sample_ids(64 * number, 64).tolist()
        contents: list[Any] = [source.record(one)["jpg"] for one in ids]
        return torch.stack([torch.from_numpy(decode_image(one)) for one in contents])

    return read


def _tokens(folder: str) -> Callable[[int], Any]:
    spec = DataSpec(path=folder, sequence_length=8192, batch_sequences=8, microbatch_sequences=8)
    stream = open_stream(spec, seed=0, vocab_size=257)
    sharding = BatchSharding(8, 8, 0, 1, CPU, torch.float32)

    def read(number: int) -> Any:
        ids = stream.order.sample_ids(8 * number, 8)
        host = read_local_batch(stream.samples, ids, sharding, total_ids=ids)
        return [host.rows, host.offsets_X]

    return read


def _cpu() -> float:
    times = os.times()
    return times.user + times.system
