"""Checkpoints: ours, torch.save and torch's distributed checkpoint (DCP), the same state on the same disk.

    python -m bench.checkpoint --work DIR --megabytes 768 --rounds 5 --out bench/results/checkpoint_X.md

Everything is written into a new folder inside DIR, which is deleted at the end; nothing else in DIR is
touched. One rank with fp32 weights and two moments on the CPU. All contenders take turns in every round. The
best and the worst round are printed, and the least processor time of a round (user and system, all threads).
The limits are measured in the same rounds: a bare copy to a host buffer that exists, and one sequential write
(with fsync) and read of the same bytes. Reads begin with a cold page cache.
"""

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from meshwright.bench.machine_facts import machine_facts, package_versions
from meshwright.checkpoint.load import load_tensors, read_manifest, require_sizes
from meshwright.checkpoint.saver import SaveOutcome, Saver
from meshwright.checkpoint.snapshot import HostSnapshot
from meshwright.spec import CheckpointSpec

_CHUNK_BYTES = 64 << 20
_LAYERS = 12
Times = dict[str, list[float]]
_CPU = " (processor)"
"""Ends the names under which the processor time of an action is noted."""


@contextmanager
def new_folder_in(directory: Path) -> Iterator[Path]:
    """A new folder of ours inside a folder of the user, deleted at the end with all that is in it."""
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-", dir=directory) as made:
        yield Path(made)


def state_of(num_bytes: int) -> dict[str, Tensor]:
    """Weights and two moments of a few layers, random: nothing compresses them."""
    each = num_bytes // (4 * 3 * _LAYERS)
    names = ("model.{}.weight", "optim.{}.weight.exp_avg", "optim.{}.weight.exp_avg_sq")
    return {name.format(layer): torch.randn(each) for layer in range(_LAYERS) for name in names}


def like(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors to load into, in memory that is there already, as at a resume."""
    return {name: torch.full_like(tensor, 1.0) for name, tensor in state.items()}


def timed(times: Times, name: str, action: Callable[[], Any]) -> Any:
    """The result of an action, whose seconds are noted."""
    started_at, cpu_before = time.perf_counter(), time.process_time()
    result = action()
    times.setdefault(name, []).append(time.perf_counter() - started_at)
    times.setdefault(name + _CPU, []).append(time.process_time() - cpu_before)
    return result


def forget(folder: Path) -> None:
    """Drop the files of a folder from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)  # pages that are not on the disk yet would stay
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def sequential(work: Path, state: dict[str, Tensor], times: Times) -> None:
    """The limits of the disk: all bytes into one file, and back."""
    path = work / "plain" / "bytes"
    path.parent.mkdir()
    views = [tensor.numpy().data.cast("B") for tensor in state.values()]

    def write() -> None:
        with path.open("wb", buffering=0) as stream:
            for view in views:
                stream.write(view)
            os.fsync(stream.fileno())

    def read() -> None:
        buffer = bytearray(_CHUNK_BYTES)
        with path.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass

    timed(times, "sequential write", write)
    forget(path.parent)
    timed(times, "sequential read", read)


def ours(state: dict[str, Tensor], times: Times, saver: Saver, bare_copy: Callable[[], object]) -> None:
    """A save in the background, the same with training waiting, and a verified load.

    The bare copy comes just before the save in one round and just after it in the next: the first copy after
    a pause is slower, because its threads are woken and spread over the cores.
    """
    is_copied_first = saver.saved_step is not None and saver.saved_step % 4 == 0
    step = (saver.saved_step or 0) + 1
    if is_copied_first:
        timed(times, "bare copy to host memory", bare_copy)

    def save() -> SaveOutcome:
        timed(times, "ours, background: stall", lambda: saver.start(step, state, {}))
        return saver.wait()[0]

    outcome = timed(times, "ours, background: total", save)
    if not is_copied_first:
        timed(times, "bare copy to host memory", bare_copy)
    folder = outcome.folder
    assert folder is not None, outcome.error
    target = like(state)
    forget(folder)

    def load() -> None:
        manifest = read_manifest(folder)
        require_sizes(folder, manifest)
        load_tensors(folder, target, files=manifest["files"])

    timed(times, "ours: verify and load", load)
    forget(folder)
    timed(times, "ours: load without verification", lambda: load_tensors(folder, target))
    timed(times, "ours, training waits: total", lambda: saver.save(step + 1, state, {}))


def torch_save(work: Path, state: dict[str, Tensor], times: Times) -> None:
    """torch.save into one file, flushed to the disk."""
    path = work / "torch" / "state.pt"
    path.parent.mkdir()

    def save() -> None:
        with path.open("wb") as stream:
            torch.save(state, stream)
            stream.flush()
            os.fsync(stream.fileno())

    timed(times, "torch.save: stall = total", save)
    forget(path.parent)
    timed(times, "torch.load", lambda: torch.load(path, weights_only=True))


def distributed(work: Path, state: dict[str, Tensor], times: Times) -> None:
    """DCP, synchronous and asynchronous (thread)."""
    writer = dcp.FileSystemWriter(work / "dcp", sync_files=True)
    timed(times, "DCP sync: stall = total", lambda: dcp.save(state, storage_writer=writer))
    forget(work / "dcp")
    target = like(state)
    timed(times, "DCP load", lambda: dcp.load(target, checkpoint_id=work / "dcp"))
    writer = dcp.FileSystemWriter(work / "dcp_async", sync_files=True)

    def save() -> None:
        future: Any = timed(times, "DCP async: stall", lambda: dcp.async_save(state, storage_writer=writer))
        future.result()

    timed(times, "DCP async: total", save)


def measure(work: Path, num_bytes: int, rounds: int) -> Times:
    """Seconds of every contender in every round; the first round allocates buffers and does not count."""
    state, times = state_of(num_bytes), Times()
    copy = HostSnapshot(torch.device("cpu"))
    assert copy.reserve(state), "too little host memory"
    saver = Saver(work / "ours", CheckpointSpec(every_steps=1), torch.device("cpu"), timeout_seconds=600.0)
    for number in range(rounds + 1):
        found: Times = {}
        sequential(work, state, found)
        ours(state, found, saver, lambda: copy.copy(state))
        torch_save(work, state, found)
        distributed(work, state, found)
        for folder in work.iterdir():
            shutil.rmtree(folder)
        if number:
            for name, seconds in found.items():
                times.setdefault(name, []).extend(seconds)
    saver.close()
    return times


def limit_of(name: str) -> str:
    """The limit that a contender is compared with."""
    if name.endswith(": stall") or name.startswith("bare"):
        return "bare copy to host memory"
    return "sequential read" if "load" in name or name.endswith("read") else "sequential write"


def table(times: Times, num_bytes: int) -> str:
    """A line for each contender: best, worst, rate, and its limit's time / its time."""
    lines = ["| | best s | worst s | processor s | MB/s | share of its limit |", "|---|---|---|---|---|---|"]
    for name, seconds in times.items():
        if name.endswith(_CPU):
            continue
        best, limit, cpu = min(seconds), min(times[limit_of(name)]), min(times[name + _CPU])
        figures = f"{best:.3f} | {max(seconds):.3f} | {cpu:.3f} | {num_bytes / best / 1e6:,.0f}"
        lines.append(f"| {name} | {figures} | {limit / best:.0%} |")
    return "\n".join(lines)


def report(times: Times, num_bytes: int, rounds: int) -> str:
    """The page of results."""
    found, stall = machine_facts(torch.device("cpu")), min(times["ours, background: stall"])
    facts = f"{found['device']}, {found['threads']} thread(s), shared with other work; {found['date']}"
    ratio = stall / min(times["bare copy to host memory"])
    versions = ", ".join(f"{name} {version}" for name, version in package_versions(("safetensors",)).items())
    return (
        f"# Checkpoints\n\n{facts}; torch {torch.__version__}, {versions}. {num_bytes / 1e6:,.0f} MB of fp32 "
        f"state on one rank, {rounds} rounds, contenders take turns. `python -m bench.checkpoint`.\n\n"
        f"{table(times, num_bytes)}\n\nStall of ours / bare copy: {ratio:.2f}.\n"
    )


def main() -> None:
    """Measure and print; `--out` writes the page too."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--megabytes", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    num_bytes = options.megabytes * 10**6
    with new_folder_in(options.work) as work:
        text = report(measure(work, num_bytes, options.rounds), num_bytes, options.rounds)
    print(text)
    if options.out:
        options.out.write_text(text)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
