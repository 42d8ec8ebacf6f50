"""How many ways each mesh axis is cut. Field name = axis name = flag = table column."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from meshwright.spec.base import Positive, Spec
from meshwright.units import parse_count

Schedule = Literal[
    "gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev"
]
CpKind = Literal["gather", "ring", "ulysses", "hierarchical"]
ZeroStage = Annotated[int, Field(ge=0, le=3), BeforeValidator(parse_count)]
# From outer to inner: neighbours on the innermost axis are neighbours on the node.
MESH_ORDER = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


class ParallelSpec(Spec):
    """One device by default. sp follows tp; ep borrows ranks from dp_shard x cp and adds none."""

    dp_replicate: Positive = 1
    """Copies of the whole (possibly sharded) model; gradients are all-reduced between them."""
    dp_shard: Positive = 1
    """Data-parallel ranks that share one copy of the state, as `zero` says."""
    zero: ZeroStage = 0
    """What dp_shard x cp divides: 1 optimizer states, 2 gradients too, 3 parameters too."""
    reduce: Literal["each", "last"] = "each"
    """zero 2 and 3: after each micro-batch gradients are reduced and a shard of them is kept, or once after
    the last one, which sends less and keeps whole gradients, as zero 0 and 1 do. Pipelines too."""
    cp: Positive = 1
    """Context parallel: each rank holds a part of every sequence."""
    cp_kind: CpKind = "gather"
    """How attention sees the other ranks: gather keys, pass them in a ring, or exchange heads."""
    cp_inner: Positive = 1
    """hierarchical only: ranks of cp that exchange heads; the ring runs across cp / cp_inner."""
    tp: Positive = 1
    """Tensor parallel, with sequence parallel between the blocks."""
    pp: Positive = 1
    """Pipeline stages over ranks."""
    schedule: Schedule = "1f1b"
    """Order of forward and backward micro-batches when pp > 1."""
    virtual_stages: Positive = 1
    """Model chunks per pipeline rank."""
    ep: Positive = 1
    """Expert parallel: experts are dealt out over this many ranks of dp_shard x cp."""
    etp: Positive = 1
    """Expert tensor parallel: 1 (each expert whole) or tp."""

    @property
    def num_ranks(self) -> int:
        """Size of the world."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def dp(self) -> int:
        """Ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def num_stages(self) -> int:
        """Pipeline stages over the whole model."""
        return self.pp * self.virtual_stages

    @property
    def state_shards(self) -> int:
        """Ways `zero` divides the state of a dense parameter."""
        return self.dp_shard * self.cp if self.zero else 1
