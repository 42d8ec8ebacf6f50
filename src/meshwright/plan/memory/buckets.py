"""The buckets in which our runtime reduces gradients at ZeRO 0 to 2, as parallel/dp.py fills them.

Parameters join from the last to the first; a buffer is full at so many elements of whole parameters. Where
tp leaves a parameter uncut its gradient has another sum ahead of it, and dealt-out experts are summed over
other ranks, so each goes with its like.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.plan.workload.layouts import Floats
from meshwright.spec.model import ModelSpec
from meshwright.spec.parameters import Parameter, parameters

BUCKET_ELEMENTS = 25_000_000
"""100 MB of fp32: large enough for full bandwidth, small enough to overlap; parallel/dp.py reads it here."""
ARRIVAL = (
    *("down", "up", "gate", "experts.down", "experts.up", "experts.gate"),
    *("output", "value", "key", "query"),
)
"""In which order backward finds the gradients of a block's matrices."""


class Stage(NamedTuple):
    """What decides the buffers of a rank."""

    num_layers: int
    has_embedding: bool
    has_head: bool
    is_cut: bool
    """Whether tp is larger than 1."""
    tp: int = 1
    """Set where there are experts, which tp does not cut: then sizes are those of a rank."""
    ep: int = 1
    expert_rows: int = 1
    """Ranks that divide a buffer of experts; it is padded to whole experts for each."""

    @property
    def sends_experts_last(self) -> bool:
        """Experts that are summed over other ranks than the rest; counted as launched after all others."""
        return self.tp > 1 or self.ep > 1


class Flats(NamedTuple):
    """The buffers of one stage, in the order in which they are launched."""

    whole: Floats
    """Elements of the gradients that are copied into each; on a rank where there are experts, else before
    sharding."""
    padded: Floats
    """Of each buffer."""
    copies: Floats
    """Of gradients that are padded in flight into each."""
    is_experts: NDArray[np.bool_]
    """Of experts alone, which other ranks divide."""
    last_index: int
    """Of the buffer with the first parameters of the stage, which backward reaches last."""
    ends: float
    """Elements of buffers that are full before the last block: the head's, when it is large."""
    largest_parameter: float
    expert_rows: int

    @property
    def last(self) -> float:
        """Elements of that last buffer."""
        return float(self.padded[self.last_index])

    @property
    def largest(self) -> float:
        """Of one buffer."""
        return float(self.padded.max())

    @property
    def waiting(self) -> float:
        """Elements of gradients that are launched with the last buffer or after it."""
        return sum(self.whole[self.last_index :].tolist())

    def fullest_reduction(self, shards: float, *, is_tail: bool = False) -> float:
        """Elements held at the fullest phase when all buffers, or those from the last one on, are launched
        one after the other: a buffer, what goes into it, and with ZeRO the shard that becomes of it.

        0 shards: ZeRO shards nothing.
        """
        here = slice(self.last_index if is_tail else 0, None)
        whole, padded, copies = self.whole[here], self.padded[here], self.copies[here]
        rows = np.where(self.is_experts[here], self.expert_rows, shards)
        shard = padded / rows if shards else np.zeros_like(padded)
        waiting = np.subtract.accumulate([sum(whole.tolist()), *whole])[1:]
        sent = np.add.accumulate([0.0, *(shard if shards else padded)])[:-1]
        held = np.where(copies > 0, np.maximum(whole, shard) + copies + padded, whole + padded + shard)
        return float((waiting + held + sent).max())


class Bucket(NamedTuple):
    """Parameters that are reduced together, and what follows from them."""

    members: tuple[Parameter, ...]
    contents: int
    """Equal for buckets whose members have equal sizes, as those of most blocks do."""
    lowest: int | None
    """The first block that it has parameters of; -1 for what stands before the blocks."""
    block: int | None
    """The same of blocks alone."""
    arrival: str | None
    """The matrix of that block whose gradient completes the bucket."""
    has_embedding: bool
    has_experts: bool
    starts_with_experts: bool


class Load(NamedTuple):
    """Elements of a bucket on a rank where there are experts, else before sharding."""

    whole: float
    """Of its gradients."""
    padded: float
    """Of its buffer."""
    copies: float
    """Of gradients that are padded."""
    largest: float
    """Of its largest parameter."""


class Outline(NamedTuple):
    """What decides which parameters of a stage share a bucket, whatever their sizes on a rank are."""

    num_layers: int
    has_embedding: bool
    has_head: bool
    is_cut: bool
    sends_experts_last: bool


class Filled(NamedTuple):
    """The buckets of a stage, in the order in which they are launched."""

    buckets: tuple[Bucket, ...]
    last_index: int
    """Of the bucket with the first parameters of the stage."""


def _bucket(members: tuple[Parameter, ...], contents: int) -> Bucket:
    blocks = [one.layer for one in members if one.layer is not None]
    layers = [layer for layer in map(_layer_of, members) if layer is not None]
    block = min(blocks, default=None)
    names = {_matrix(one) for one in members if block is not None and one.layer == block}
    kinds = {one.kind for one in members}
    return Bucket(
        members,
        contents,
        lowest=min(layers, default=None),
        block=block,
        arrival=next((name for name in reversed(ARRIVAL) if name in names), None),
        has_embedding="embedding" in kinds,
        has_experts="expert" in kinds,
        starts_with_experts=members[0].kind == "expert",
    )


class Launch(NamedTuple):
    """A bucket that is launched within the backward of a block."""

    block: int
    """Blocks before the one that completes it."""
    name: str
    """Of the matrix whose gradient completes it."""
    elements: float
    sent: float
    """Elements launched before."""


class Buckets:
    """The buffers of every stage of one model."""

    def __init__(self, model: ModelSpec) -> None:
        self._model = model
        listed = parameters(model)
        self._blocks: list[list[Parameter]] = [[] for _ in range(model.num_layers)]
        for one in listed:
            if one.layer is not None:
                self._blocks[one.layer].append(one)
        self._before = [one for one in listed if one.kind in ("embedding", "position")]
        self._after = [
            one for one in listed if one.layer is None and one.kind not in ("embedding", "position")
        ]
        self._elements = {one.name: one.num_elements for one in listed}
        self._filled: dict[Outline, Filled] = {}
        self._known: dict[tuple[bool, bool, str, str], Bucket] = {}
        self._contents: dict[tuple[tuple[str, int, int], ...], int] = {}
        self._loads: dict[tuple[int, int, int, int], Load] = {}
        self._flats: dict[Stage, Flats] = {}
        self._launches: dict[Stage, list[Launch]] = {}
        self._sent: dict[tuple[Stage, int], float] = {}
        self._reductions: dict[tuple[Stage, float], tuple[float, float]] = {}

    def flats(self, stage: Stage) -> Flats:
        """Sizes of the buffers of a stage."""
        if stage not in self._flats:
            self._flats[stage] = self._flats_of(stage)
        return self._flats[stage]

    def fullest_reductions(self, stage: Stage, shards: float) -> tuple[float, float]:
        """`Flats.fullest_reduction` of all buckets, and of those from the last one on."""
        if (stage, shards) not in self._reductions:
            found = self.flats(stage)
            both = found.fullest_reduction(shards), found.fullest_reduction(shards, is_tail=True)
            self._reductions[stage, shards] = both
        return self._reductions[stage, shards]

    def launches(self, stage: Stage) -> list[Launch]:
        """The buffers that blocks complete, without the one that the embedding does."""
        if stage not in self._launches:
            self._launches[stage] = self._launched(stage)
        return self._launches[stage]

    def _launched(self, stage: Stage) -> list[Launch]:
        found: list[Launch] = []
        sent, is_apart = 0.0, stage.sends_experts_last
        for bucket, elements in self._sized_buckets(stage):
            is_last = is_apart and bucket.starts_with_experts
            is_inner = bucket.block is not None and not is_last and not bucket.has_embedding
            if is_inner and bucket.block is not None and bucket.arrival is not None:
                found.append(Launch(bucket.block, bucket.arrival, elements, sent))
            sent += elements
        return found

    def sent_before(self, stage: Stage, block: int) -> float:
        """Elements of the buffers that are launched before the backward of a block of the stage begins."""
        if (stage, block) not in self._sent:
            self._sent[stage, block] = self._sum_before(stage, block)
        return self._sent[stage, block]

    def _sum_before(self, stage: Stage, block: int) -> float:
        first = self._model.num_layers - stage.num_layers
        sent, is_apart = 0.0, stage.sends_experts_last
        for bucket, size in self._sized_buckets(stage):
            is_last = is_apart and bucket.starts_with_experts
            if not is_last and (bucket.lowest is None or bucket.lowest > first + block):
                sent += size
        return sent

    def _sized_buckets(self, stage: Stage) -> list[tuple[Bucket, float]]:
        """The buckets of a stage with the elements of their buffers."""
        return [(bucket, self._load(stage, bucket).padded) for bucket in self._fill(stage).buckets]

    def _load(self, stage: Stage, bucket: Bucket) -> Load:
        """Elements of a bucket, worked out once for buckets with the same contents."""
        key = bucket.contents, stage.tp, stage.ep, stage.expert_rows
        if key not in self._loads:
            unpadded = stage._replace(expert_rows=1)
            wholes = [self._local(unpadded, one) for one in bucket.members]
            sizes = [self._local(stage, one) for one in bucket.members]
            copies = sum(size for size, whole in zip(sizes, wholes, strict=True) if size > whole)
            self._loads[key] = Load(sum(wholes), sum(sizes), copies, max(sizes))
        return self._loads[key]

    def _local(self, stage: Stage, one: Parameter) -> float:
        elements = self._elements[one.name]
        if one.kind in ("norm", "router", "position"):
            return float(elements)
        if one.kind != "expert":
            return elements / stage.tp
        here = one.shape[0] / stage.ep
        rows = -(-here // stage.expert_rows) * stage.expert_rows
        return rows * elements / one.shape[0]

    def _flats_of(self, stage: Stage) -> Flats:
        filled = self._fill(stage)
        loads = [self._load(stage, bucket) for bucket in filled.buckets]
        whole, padded, copies, largest = np.array(loads, dtype=np.float64).T
        is_apart = stage.sends_experts_last
        return Flats(
            *(whole, padded, copies),
            is_experts=np.array([is_apart and bucket.starts_with_experts for bucket in filled.buckets]),
            last_index=filled.last_index,
            ends=sum(load.padded for load, one in zip(loads, filled.buckets, strict=True) if _is_end(one)),
            largest_parameter=float(largest.max()),
            expert_rows=stage.expert_rows,
        )

    def _held(self, stage: Outline) -> list[Parameter]:
        """The parameters of a stage from the last to the first; its blocks are the last of the model."""
        tied = self._before[:1] if self._model.tied_head and stage.has_head else []
        before = self._before if stage.has_embedding else tied
        blocks = self._blocks[self._model.num_layers - stage.num_layers :]
        after = self._after if stage.has_head else []
        return [*before, *(one for block in blocks for one in block), *after][::-1]

    def _fill(self, stage: Stage) -> Filled:
        outline = Outline(*stage[:4], stage.sends_experts_last)
        if outline not in self._filled:
            self._filled[outline] = self._filled_outline(outline)
        return self._filled[outline]

    def _filled_outline(self, stage: Outline) -> Filled:
        runs: dict[tuple[bool, bool], list[Parameter]] = {}
        for one in self._held(stage):
            is_last = stage.sends_experts_last and one.kind == "expert"
            is_uncut = stage.is_cut and one.kind in ("norm", "router", "position")
            runs.setdefault((is_last, is_uncut), []).append(one)
        found = tuple(bucket for kind in sorted(runs) for bucket in self._cut_runs(stage, runs[kind]))
        # Where tp is larger than 1 norms have a small buffer of their own, which is launched after this one.
        smaller = ("norm", "router", "expert") if stage.is_cut else ()
        first = [one for one in self._held(stage) if one.kind not in smaller][-1]
        return Filled(found, next(i for i, bucket in enumerate(found) if first in bucket.members))

    def _cut_runs(self, stage: Outline, run: list[Parameter]) -> list[Bucket]:
        found: list[Bucket] = []
        first = elements = 0
        kind = stage.is_cut, stage.sends_experts_last
        for end, one in enumerate(run, start=1):
            elements += self._elements[one.name]
            if elements >= BUCKET_ELEMENTS or end == len(run):
                # Stages of the same kind have most of their buckets in common.
                key = (*kind, run[first].name, one.name)
                if key not in self._known:
                    self._known[key] = self._new_bucket(tuple(run[first:end]))
                found.append(self._known[key])
                first, elements = end, 0
        return found

    def _new_bucket(self, members: tuple[Parameter, ...]) -> Bucket:
        sizes = tuple((one.kind, self._elements[one.name], one.shape[0]) for one in members)
        return _bucket(members, self._contents.setdefault(sizes, len(self._contents)))


@lru_cache(maxsize=8)
def buckets_of(model: ModelSpec) -> Buckets:
    """The buckets of a model; the same object for the same model, because filling them takes a while."""
    return Buckets(model)


def _matrix(one: Parameter) -> str:
    """The name of a matrix as MATRICES has it."""
    parts = one.name.split(".")
    return ".".join(parts[-2:]) if one.kind == "expert" else parts[-2]


def _layer_of(one: Parameter) -> int | None:
    """What stands before the blocks counts as one more block before them."""
    return -1 if one.kind in ("embedding", "position") else one.layer


def _is_end(bucket: Bucket) -> bool:
    return bucket.block is None and any(one.kind == "head" for one in bucket.members)
