"""Runs with a run directory: trained on the pool of ranks, stopped, killed and resumed."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from tests.support.equivalence import this_world
from torch import Tensor

from meshwright.checkpoint import save
from meshwright.checkpoint.index import read_index
from meshwright.checkpoint.load import complete_checkpoints, load_tensors, read_manifest
from meshwright.checkpoint.shard_file import DTYPE_NAMES
from meshwright.rehearse.rank_pool import RankFailure, RankPool
from meshwright.spec import RunSpec
from meshwright.train import loop
from meshwright.train.session import claimed_directory


class Attempt(NamedTuple):
    """How one start of a run ended, as one rank reports it."""

    kind: str
    step: int
    sample_ids: list[tuple[int, ...]]
    """The sample ids of each batch that was trained on."""


def attempt(ranks: RankPool, run: RunSpec, run_dir: Path, *, stop_after: int | None = None) -> Attempt:
    """Start or resume the run in `run_dir`; it ends by itself, or by SIGTERM after `stop_after` batches."""
    results = ranks.run(train_here, run.parallel.num_ranks, run, run_dir, stop_after)
    assert len({(result.kind, result.step) for result in results}) == 1
    return results[0]


def train_here(run: RunSpec, run_dir: Path, stop_after: int | None = None) -> Attempt:
    """One rank's part of an attempt."""
    sample_ids: list[tuple[int, ...]] = []
    train_step = loop.train_step

    def watched(training: Any, batch: Any, **options: Any) -> Any:
        sample_ids.append(batch.sample_ids)
        if len(sample_ids) == stop_after and this_world().rank == 0:
            signal.raise_signal(signal.SIGTERM)  # one rank gets the signal; all must stop at the same step
        return train_step(training, batch, **options)

    with claimed_directory(run, run_dir), patch.object(loop, "train_step", watched):
        outcome = loop.train(run, this_world(), run_dir)
    return Attempt(outcome.kind, outcome.state.step, sample_ids)


@contextlib.contextmanager
def killed_after(ranks: RankPool, seconds: float) -> Iterator[None]:
    """Send SIGKILL to every rank of the pool after some seconds, while the body runs."""

    def kill() -> None:
        for pid in ranks.process_ids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    timer = threading.Timer(seconds, kill)
    timer.start()
    try:
        with contextlib.suppress(RankFailure):
            yield
    finally:
        timer.cancel()
        timer.join()


# What a save does to the disk, in its order; a kill may come before or after each of them.
DISK_CALLS = [(os, "fsync"), (Path, "rename"), (Path, "mkdir"), (Path, "unlink"), (save.shutil, "rmtree")]


@contextlib.contextmanager
def dying_at_disk_call(fatal_call: int) -> Iterator[list[int]]:
    """Send SIGKILL to rank 0 at the n-th change of the disk by a save; the list of one counts them."""
    count = [0]

    def counted(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if count[0] == fatal_call and this_world().rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            count[0] += 1
            return function(*args, **kwargs)

        return call

    with contextlib.ExitStack() as patches:
        for owner, name in DISK_CALLS:
            patches.enter_context(patch.object(owner, name, counted(getattr(owner, name))))
        yield count


def last_checkpoint(run_dir: Path) -> Path:
    """The newest complete checkpoint of a run directory."""
    return complete_checkpoints(run_dir / "checkpoints")[-1]


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Name -> full tensor, for every tensor of a checkpoint."""
    index = read_index(folder)
    dtypes = {name: dtype for dtype, name in DTYPE_NAMES.items()}
    tensors = {name: torch.empty(entry.shape, dtype=dtypes[entry.dtype]) for name, entry in index.items()}
    load_tensors(folder, tensors)
    return tensors


def resume_facts(folder: Path) -> dict[str, Any]:
    """The part of the manifest that a resume depends on: no times, hashes or layout."""
    manifest = read_manifest(folder)
    state = {key: value for key, value in manifest["state"].items() if key != "train_seconds"}
    return {"state": state, **{key: manifest[key] for key in ("step", "data", "loss_scale", "trajectory")}}


def assert_same_state(one_dir: Path, other_dir: Path) -> None:
    """The last checkpoints of both directories are equal: tensors bit by bit, and the manifest."""
    one, other = last_checkpoint(one_dir), last_checkpoint(other_dir)
    assert resume_facts(one) == resume_facts(other)
    tensors, others = read_tensors(one), read_tensors(other)
    assert set(tensors) == set(others)
    different = [name for name, tensor in tensors.items() if not torch.equal(tensor, others[name])]
    assert not different, f"{len(different)} of {len(tensors)} tensors differ: {different[:5]}"
