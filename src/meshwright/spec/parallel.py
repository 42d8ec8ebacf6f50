"""The degree of each mesh axis. Field name = axis name = flag = table column."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from meshwright.spec.base import Positive, Spec
from meshwright.units import parse_count

Schedule = Literal[
    "gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev"
]
GradReduce = Literal["each_microbatch", "last_microbatch"]
CpKind = Literal["gather", "ring", "ulysses", "hierarchical"]
EpOverlap = Literal["none", "shared", "halves"]
ZeroStage = Annotated[int, Field(ge=0, le=3), BeforeValidator(parse_count)]
# From outer to inner: neighbours on the innermost axis are neighbours on the node.
MESH_ORDER = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


class ParallelSpec(Spec):
    """One device by default. sp follows tp; ep borrows ranks from dp_shard x cp and adds none."""

    dp_replicate: Positive = 1
    """Replicas of the full (possibly sharded) model; gradients are all-reduced between them (DDP, HSDP)."""
    dp_shard: Positive = 1
    """Data-parallel ranks that shard one copy of the state, by the stage in `zero`."""
    zero: ZeroStage = 0
    """ZeRO stage, what dp_shard x cp shards: 1 optimizer states, 2 gradients too, 3 parameters too (FSDP)."""
    grad_reduce: GradReduce = "each_microbatch"
    """zero 2 and 3: reduce-scatter gradients after each micro-batch and keep a shard of them, or once after
    the last one, which sends less and keeps unsharded gradients, as zero 0 and 1 do. Pipelines too."""
    cp: Positive = 1
    """Context parallel: each rank holds a part of every sequence."""
    cp_kind: CpKind = "gather"
    """How attention sees the keys of other ranks: all-gather, ring attention, or all-to-all of heads
    (ulysses); hierarchical is ulysses inside a ring."""
    cp_inner: Positive = 1
    """hierarchical only: cp ranks that exchange heads; the ring runs across cp / cp_inner."""
    cp_stripes: Positive = 1
    """gather with separate documents: parts of the sequence that are each sharded over cp. More of them
    balance the work of ranks where documents differ in length, with shorter kernel calls."""
    tp: Positive = 1
    """Tensor parallel, with sequence parallel between the blocks."""
    pp: Positive = 1
    """Pipeline parallel: ranks that hold consecutive layers."""
    schedule: Schedule = "1f1b"
    """Order of forward and backward micro-batches when pp > 1."""
    virtual_stages: Positive = 1
    """Pipeline stages (model chunks) per pipeline rank."""
    ep: Positive = 1
    """Expert parallel: experts are distributed over this many ranks of dp_shard x cp."""
    etp: Positive = 1
    """Expert tensor parallel: 1 (each expert unsharded) or tp."""
    ep_overlap: EpOverlap = "none"
    """What runs while rows are in flight between ep ranks: nothing, the shared experts (shared), or the
    experts of the other half of a micro-batch's tokens (halves)."""

    @property
    def num_ranks(self) -> int:
        """World size."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def dp(self) -> int:
        """Ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def num_stages(self) -> int:
        """Pipeline stages of the model."""
        return self.pp * self.virtual_stages


def mesh_coordinates(parallel: ParallelSpec, rank: int) -> dict[str, int]:
    """The coordinate of a rank on every mesh axis; tp is innermost."""
    found: dict[str, int] = {}
    for axis in reversed(MESH_ORDER):
        rank, found[axis] = divmod(rank, getattr(parallel, axis))
    return found
