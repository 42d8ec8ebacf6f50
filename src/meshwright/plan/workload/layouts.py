"""Many layouts at once, as a struct of arrays: the input of every formula of the planner.

One layout has arrays of length one, so the search and an exact prediction evaluate the same formulas.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import cast

import numpy as np
from numpy.typing import NDArray

from meshwright.plan.workload.schedules import SCHEDULES
from meshwright.spec.memory import MemorySpec
from meshwright.spec.parallel import CpKind, EpOverlap, ParallelSpec

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

# Fields of ParallelSpec that are columns of the same name.
DEGREES = (
    *("dp_replicate", "dp_shard", "zero", "cp", "cp_inner", "cp_stripes", "tp", "pp", "virtual_stages", "ep"),
    "etp",
)
CP_KINDS: tuple[CpKind, ...] = ("gather", "ring", "ulysses", "hierarchical")
EP_OVERLAPS: tuple[EpOverlap, ...] = ("none", "shared", "halves")

# Parts of a layer whose activations are recomputed in backward; FULL keeps only the layer's input.
NORMS, CORE_ATTENTION, MLP, EXPERTS, ACTIVATION, FULL = 1, 2, 4, 8, 16, 32
RECOMPUTE_NONE = 0
RECOMPUTE_SELECTIVE = NORMS | ACTIVATION
"""`recompute: selective` of our runtime: matmul and attention outputs are kept, the rest is recomputed."""
RECOMPUTE_BITS: Mapping[str, int] = {"none": RECOMPUTE_NONE, "selective": RECOMPUTE_SELECTIVE, "full": FULL}

# What is offloaded to host memory.
OFFLOAD_BITS: Mapping[str, int] = {"optimizer": 1, "parameters": 2, "activations": 4, "embedding": 8}

MAX_CODE = 2**62


@dataclass(frozen=True)
class Layouts:
    """Degrees, micro-batches and memory policy of N layouts; every field has shape (N,)."""

    dp_replicate: Ints
    dp_shard: Ints
    zero: Ints
    cp: Ints
    tp: Ints
    pp: Ints
    virtual_stages: Ints
    ep: Ints
    etp: Ints
    microbatch_sequences: Ints
    num_microbatches: Ints
    """Micro-batches per optimizer step of one data-parallel rank."""
    recompute: Ints
    """Bits of the recomputed parts: RECOMPUTE_NONE, RECOMPUTE_SELECTIVE, FULL, or a union of parts."""
    recompute_every: Ints
    schedule: Ints
    """Position in SCHEDULES."""
    cp_kind: Ints
    """Position in CP_KINDS."""
    cp_inner: Ints
    cp_stripes: Ints
    ep_overlap: Ints
    """Position in EP_OVERLAPS."""
    offload: Ints
    """Bits of what is offloaded to host memory, by OFFLOAD_BITS."""
    reduce_last: Ints
    """1: ZeRO-2 and 3 keep unsharded gradients and reduce them once, after the last micro-batch."""
    regather: Ints
    """1: inputs of column-parallel layers are all-gathered over tp again in backward, not kept."""

    def __len__(self) -> int:
        return len(self.tp)

    @property
    def dp(self) -> Ints:
        """Number of ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def num_ranks(self) -> Ints:
        """Number of ranks of the world."""
        return self.dp * self.cp * self.tp * self.pp

    @property
    def num_stages(self) -> Ints:
        """Number of pipeline stages of the model."""
        return self.pp * self.virtual_stages

    @property
    def shards(self) -> Ints:
        """Number of ranks that one copy of a dense parameter's state is sharded over."""
        return self.dp_shard * self.cp

    @property
    def batch_sequences(self) -> Ints:
        """Sequences of the global batch."""
        return self.microbatch_sequences * self.num_microbatches * self.dp

    def offloads(self, what: str) -> Floats:
        """1.0 where `what` is offloaded to host memory, else 0.0."""
        return ((self.offload & OFFLOAD_BITS[what]) > 0).astype(np.float64)

    def scatters_each(self, *, in_pipelines: bool) -> NDArray[np.bool_]:
        """Whether gradients are reduce-scattered after every micro-batch, so that only a shard is kept."""
        return (self.zero >= 2) & (self.reduce_last == 0) & ((self.pp == 1) | in_pipelines)

    @property
    def expert_passes(self) -> Floats:
        """Times that the experts of a layer run in one pass: 2 where `ep_overlap=halves`, else 1."""
        return 1.0 + (self.ep_overlap == EP_OVERLAPS.index("halves"))

    def microbatch_tokens(self, sequence_length: int) -> Floats:
        """Tokens of one micro-batch on one rank of cp."""
        return self.microbatch_sequences * (sequence_length / self.cp)

    def take(self, index: object) -> "Layouts":
        """The layouts at these positions (or where a mask is true)."""
        chosen = cast("Ints", index)
        return Layouts(**{f.name: np.atleast_1d(getattr(self, f.name)[chosen]) for f in fields(self)})

    def distinct(self, *columns: NDArray[np.integer | np.bool_]) -> tuple["Layouts", NDArray[np.intp]]:
        """One layout for each combination of values of the columns, and which of them each layout has."""
        code, size = np.zeros(len(self), dtype=np.int64), 1
        for column in columns:
            values = int(column.max(initial=0)) + 1
            if size * values > MAX_CODE:
                _, code = np.unique(code, return_inverse=True)
                size = int(code.max(initial=0)) + 1
            code, size = code * values + column, size * values
        _, first, index = np.unique(code, return_index=True, return_inverse=True)
        return self.take(first), index.reshape(-1)

    def parallel(self, index: int) -> ParallelSpec:
        """The parallel spec of one layout."""
        degrees = {name: int(getattr(self, name)[index]) for name in DEGREES}
        return ParallelSpec.model_validate(
            {
                **degrees,
                "schedule": SCHEDULES[int(self.schedule[index])],
                "cp_kind": CP_KINDS[int(self.cp_kind[index])],
                "ep_overlap": EP_OVERLAPS[int(self.ep_overlap[index])],
                "grad_reduce": "last_microbatch" if self.reduce_last[index] else "each_microbatch",
            }
        )


_DEFAULTS: Mapping[str, int] = {
    **{f.name: 1 for f in fields(Layouts)},
    "zero": 0,
    "recompute": RECOMPUTE_NONE,
    "schedule": SCHEDULES.index("1f1b"),
    "cp_kind": 0,
    "ep_overlap": 0,
    "offload": 0,
    "reduce_last": 0,
    "regather": 0,
}


def layouts(**columns: object) -> Layouts:
    """Layouts from columns that broadcast together; a column that is not given is 1, or off."""
    unknown = set(columns) - set(_DEFAULTS)
    assert not unknown, f"no such layout column: {unknown}"
    given = [np.asarray(columns.get(name, default), dtype=np.int64) for name, default in _DEFAULTS.items()]
    arrays = np.broadcast_arrays(*(np.atleast_1d(array) for array in given))
    return Layouts(**dict(zip(_DEFAULTS, arrays, strict=True)))


def concatenated(parts: Sequence[Layouts]) -> Layouts:
    """The rows of several tables in one."""
    columns = (field.name for field in fields(Layouts))
    return Layouts(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in columns})


def one_layout(
    parallel: ParallelSpec, memory: MemorySpec, *, microbatch_sequences: int, num_microbatches: int
) -> Layouts:
    """The layout of a run, as arrays of length one."""
    return layouts(
        **{name: getattr(parallel, name) for name in DEGREES},
        schedule=SCHEDULES.index(parallel.schedule),
        cp_kind=CP_KINDS.index(parallel.cp_kind),
        ep_overlap=EP_OVERLAPS.index(parallel.ep_overlap),
        microbatch_sequences=microbatch_sequences,
        num_microbatches=num_microbatches,
        recompute=RECOMPUTE_BITS[memory.recompute],
        recompute_every=memory.recompute_every,
        offload=offload_bits(memory),
        reduce_last=int(parallel.grad_reduce == "last_microbatch"),
        regather=int(memory.regather_tp_inputs),
    )


def offload_bits(memory: MemorySpec) -> int:
    """Bits of what a run offloads to host memory."""
    return sum(OFFLOAD_BITS[what] for what in memory.offload)
