"""`meshwright data logprobs`: the reference log-probs of a preference dataset, computed once and stored.

After every group of batches rank 0 writes what is known so far, so that the same command goes on after a
kill. The table appears under its name when it is complete.
"""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from meshwright.checkpoint.initial import load_initial_weights
from meshwright.data.packing_cache import PLAN_VERSION
from meshwright.data.pair_samples import NO_PAIR, PairSamples
from meshwright.errors import DataError
from meshwright.mesh import Mesh, build_mesh, join_world
from meshwright.spec import MemorySpec, OptimSpec, RunSpec
from meshwright.train.build import build_data, build_training
from meshwright.train.capacity import require_capacity
from meshwright.train.reference import reference_log_probs, require_pairs
from meshwright.train.reference_file import (
    STORED_FACTS,
    STORED_FILE,
    Facts,
    Table,
    read_table,
    stored_difference,
    stored_facts,
    write_table,
)
from meshwright.train.session import on_first_rank

BATCHES_BETWEEN_SAVES = 32
PARTIAL_FILE, PARTIAL_FACTS = ".reference_logprobs.partial.npy", ".reference_logprobs.partial.json"


def store_log_probs(run: RunSpec, *, force: bool, progress: Callable[[int, int], object]) -> int:
    """Compute and store the log-probs of all pairs by the run's weights at its start; all ranks call it.

    Returns the number of pairs. `progress` gets the rows done and their number, on rank 0. What is stored
    already and fits is left as it is; what does not fit is refused without `force`.
    """
    run = run.with_(optim=OptimSpec(kind="sgd", beta1=0.0), memory=MemorySpec())
    world = join_world(run.device, launch=run.launch)
    on_first_rank(lambda: require_capacity(run, world.device))
    mesh = build_mesh(run.parallel, world)
    batches = build_data(run, mesh)
    samples, folder = batches.samples, Path(str(run.data.path))
    require_pairs(run, samples)
    assert isinstance(samples, PairSamples)
    facts = stored_facts(run, batches.stream.parts[0].source, samples.num_pairs)
    if _from_first_rank(lambda: int(stored_difference(folder, facts) is None), mesh):
        return samples.num_pairs
    on_first_rank(lambda: _require_place(folder, facts, force=force))
    training = build_training(run, mesh)
    load_initial_weights(run, training)
    facts_of_rows = {**facts, "rows of": f"packing v{PLAN_VERSION}, {samples.sequence_length} tokens"}
    table, start = _begun(folder, facts_of_rows, mesh, samples.num_pairs)
    group = BATCHES_BETWEEN_SAVES * batches.sharding.batch_sequences
    while start < len(samples):
        rows = range(start, min(start + group, len(samples)))
        found = reference_log_probs(training.program, mesh, batches, samples, rows=rows)
        pairs = samples.pair_ids(np.arange(rows.start, rows.stop))
        pairs = pairs[pairs != NO_PAIR]
        table[pairs], start = found[pairs], rows.stop
        if mesh.rank == 0:
            write_table(folder, (PARTIAL_FILE, PARTIAL_FACTS), table, {**facts_of_rows, "rows": start})
            progress(start, len(samples))
    on_first_rank(lambda: _finish(folder, table, facts))
    return samples.num_pairs


def _require_place(folder: Path, facts: Facts, *, force: bool) -> None:
    """Refuse a folder that cannot be written, or that has other log-probs."""
    if not os.access(folder, os.W_OK):
        hint = "copy the dataset to where it can be written, or use preference.reference=start"
        raise DataError("the folder of the dataset cannot be written", where=str(folder), hint=hint)
    if (folder / STORED_FACTS).exists() and not force:
        fact = stored_difference(folder, facts) or ""
        hint = "overwrite them with --force, or pack the dataset again under another name"
        raise DataError(fact, where=str(folder / STORED_FILE), hint=hint)


def _begun(folder: Path, facts: Facts, mesh: Mesh, num_pairs: int) -> tuple[Table, int]:
    """What an earlier call with the same facts has left: its table (on rank 0) and the rows that it has.

    Rows of another length have other pairs, so their length is one of the facts.
    """
    rows = _from_first_rank(lambda: _partial_rows(folder, facts), mesh)
    if rows and mesh.rank == 0:
        return np.load(folder / PARTIAL_FILE, allow_pickle=False), rows
    return np.zeros((num_pairs, 2)), rows


def _from_first_rank(read: Callable[[], int], mesh: Mesh) -> int:
    """A number that rank 0 reads, on all ranks. Communicates; host sync."""
    shared = torch.tensor([read() if mesh.rank == 0 else 0], device=mesh.device)
    dist.broadcast(shared, 0)
    return int(shared)


def _partial_rows(folder: Path, facts: Facts) -> int:
    """Rows of the partial table; 0 where it is absent, damaged or of something else."""
    try:
        found, table = read_table(folder, (PARTIAL_FILE, PARTIAL_FACTS))
    except (OSError, ValueError):
        return 0
    rows = found.pop("rows", 0)
    return int(rows) if found == facts and table.shape == (facts["pairs"], 2) else 0


def _finish(folder: Path, table: Table, facts: Facts) -> None:
    write_table(folder, (STORED_FILE, STORED_FACTS), table, facts)
    for name in (PARTIAL_FACTS, PARTIAL_FILE):
        (folder / name).unlink(missing_ok=True)
