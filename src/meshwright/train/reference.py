"""Reference log-probs of preference pairs: those of the model at the start of the run, computed once.

No second model is held. Before the first step the model runs forward over all pairs, on the mesh of the run,
or reads the sums that `meshwright data logprobs` stored with the dataset. They are kept in the run directory,
so a resume reads them again.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from meshwright.data.batches import Batches
from meshwright.data.local_batch import read_local_batch
from meshwright.data.microbatch import Microbatch
from meshwright.data.pair_samples import NO_PAIR, PairSamples
from meshwright.data.samples import TokenSamples
from meshwright.errors import DataError
from meshwright.mesh import Mesh
from meshwright.models.decoder import Decoder, Head
from meshwright.parallel.program import Program
from meshwright.spec import RunSpec
from meshwright.train.reference_file import (
    FACTS_FILE,
    REFERENCE_FILE,
    dataset_facts,
    read_run_table,
    read_stored,
    stored_facts,
    write_table,
)


class Reference:
    """The reference of a run on preference pairs; of any other run it does nothing."""

    def __init__(self, run: RunSpec, program: Program, mesh: Mesh, batches: Batches) -> None:
        self._run, self._program, self._mesh, self._batches = run, program, mesh, batches
        require_pairs(run, batches.samples)

    @property
    def table(self) -> NDArray[np.float64] | None:
        """Log-probs of the two answers of each pair, once they are known."""
        samples = self._batches.samples
        return samples.reference if isinstance(samples, PairSamples) else None

    def prepare(self, run_dir: Path, *, is_resumed: bool) -> None:
        """Compute the reference at the start of a run, or read it on a resume; all ranks call it."""
        samples = self._samples()
        if samples is None:
            return
        source, preference = self._batches.stream.parts[0].source, self._run.preference
        facts = dataset_facts(source, samples.num_pairs)
        if is_resumed:
            samples.reference = read_run_table(run_dir, facts)
            return
        if preference is not None and preference.reference == "dataset":
            stored = stored_facts(self._run, source, samples.num_pairs)
            samples.reference = read_stored(Path(str(self._run.data.path)), stored)
        else:
            self.compute()
        if self._mesh.rank == 0 and samples.reference is not None:
            write_table(run_dir, (REFERENCE_FILE, FACTS_FILE), samples.reference, facts)

    def compute(self) -> None:
        """Compute the reference by the current weights; all ranks call it."""
        samples = self._samples()
        if samples is not None:
            samples.reference = reference_log_probs(self._program, self._mesh, self._batches, samples)

    def _samples(self) -> PairSamples | None:
        """The samples, where the loss has a reference."""
        samples, preference = self._batches.samples, self._run.preference
        has_reference = preference is not None and preference.has_reference
        return samples if isinstance(samples, PairSamples) and has_reference else None


def require_pairs(run: RunSpec, samples: TokenSamples) -> None:
    """DataError where a run on pairs has other data, or pairs are read as if they were chats."""
    is_pairs = isinstance(samples, PairSamples)
    if is_pairs and run.preference is None:
        hint = "set preference: {} in the run file for DPO, or pack chats"
        raise DataError("the dataset holds preference pairs", where=samples.name, hint=hint)
    if run.preference is not None and not is_pairs:
        hint = "pack pairs with `meshwright data pack --chat preference`"
        raise DataError("the dataset holds no preference pairs", where=samples.name, hint=hint)


def reference_log_probs(
    program: Program, mesh: Mesh, batches: Batches, samples: PairSamples, *, rows: range | None = None
) -> NDArray[np.float64]:
    """Sums of log-probs of both answers of every pair, by the current weights. Communicates; host sync.

    With `rows`, pairs of other rows have zeros.
    """
    rows = rows or range(len(samples))
    table = torch.zeros(samples.num_pairs, 2, dtype=torch.float64, device=mesh.device)
    heads = [stage.head for stage in program.stages if isinstance(stage, Decoder) and stage.head is not None]
    sharding, size = batches.sharding, batches.sharding.batch_sequences
    for start in range(rows.start, rows.stop, size):
        ids = np.arange(start, min(start + size, rows.stop), dtype=np.int64)
        batch = read_local_batch(samples, ids, sharding, total_ids=ids).on_device()
        sums_BA = _recorded(program, heads, batch.microbatches)
        if sums_BA is not None:
            pair_ids = torch.from_numpy(samples.pair_ids(sharding.local(ids))).to(mesh.device)
            is_pair = pair_ids != NO_PAIR
            table[pair_ids[is_pair]] = sums_BA.double().unflatten(1, (-1, 2))[is_pair]
    dist.all_reduce(table)  # each pair is on the ranks of one dp coordinate; the last stage alone has sums
    return (table / (mesh.parallel.tp * mesh.parallel.cp)).cpu().numpy()


def _recorded(program: Program, heads: list[Head], microbatches: Sequence[Microbatch]) -> torch.Tensor | None:
    """Sums of log-probs of all rows of this rank; None on a rank without the last stage."""
    for head in heads:
        head.recorded_sums = []
    program.evaluate(microbatches)
    found = [sums for head in heads for sums in head.recorded_sums or []]
    for head in heads:
        head.recorded_sums = None
    return torch.cat(found) if found else None
