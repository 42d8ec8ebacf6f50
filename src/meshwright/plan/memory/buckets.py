"""The buckets in which our runtime reduces gradients at ZeRO 0 to 2, as parallel/dp.py fills them.

Parameters join from the last to the first; a buffer is full at so many elements of whole parameters. Where
tp leaves a parameter uncut its gradient has another sum ahead of it, and dealt-out experts are summed over
other ranks, so each goes with its like.
"""

from functools import lru_cache
from typing import NamedTuple

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


class Flat(NamedTuple):
    """Elements of one buffer; on a rank where there are experts, else before any cut."""

    whole: float
    """Of the gradients that are copied into it."""
    padded: float
    """Of the buffer."""
    copies: float
    """Of gradients that are padded in flight into it."""
    is_experts: bool
    """Of experts alone, which other ranks divide."""

    def shard(self, shards: float, expert_rows: float) -> float:
        """What becomes of it with ZeRO; 0 shards: nothing is cut."""
        rows = expert_rows if self.is_experts else shards
        return self.padded / rows if shards else 0.0

    def launching(self, shard: float) -> float:
        """Held at the fullest phase of sending it off, beside gradients of other buffers."""
        if self.copies:
            return max(self.whole, shard) + self.copies + self.padded
        return self.whole + self.padded + shard


class Flats(NamedTuple):
    """The buffers of one stage."""

    each: tuple[Flat, ...]
    """In the order in which they are launched."""
    last_index: int
    """Of the buffer with the first parameters of the stage, which backward reaches last."""
    ends: float
    """Elements of buffers that are full before the last block: the head's, when it is large."""
    largest_parameter: float
    expert_rows: int

    @property
    def last(self) -> float:
        """Elements of that last buffer."""
        return self.each[self.last_index].padded

    @property
    def largest(self) -> float:
        """Of one buffer."""
        return max(one.padded for one in self.each)

    @property
    def waiting(self) -> float:
        """Elements of gradients that are launched with the last buffer or after it."""
        return sum(one.whole for one in self.each[self.last_index :])

    def fullest_reduction(self, shards: float, *, is_tail: bool = False) -> float:
        """Elements held at the fullest phase when all buffers, or those from the last one on, are launched
        one after the other: a buffer, what goes into it, and with ZeRO the shard that becomes of it."""
        flats = self.each[self.last_index :] if is_tail else self.each
        waiting, sent, fullest = sum(one.whole for one in flats), 0.0, 0.0
        for one in flats:
            waiting -= one.whole
            shard = one.shard(shards, self.expert_rows)
            fullest = max(fullest, waiting + one.launching(shard) + sent)
            sent += shard if shards else one.padded
        return fullest


class Bucket(NamedTuple):
    """Parameters that are reduced together, and what follows from them."""

    members: tuple[Parameter, ...]
    elements: int
    """Of the full parameters."""
    lowest: int | None
    """The first block that it has parameters of; -1 for what stands before the blocks."""
    block: int | None
    """The same of blocks alone."""
    arrival: str | None
    """The matrix of that block whose gradient completes the bucket."""
    has_embedding: bool
    has_experts: bool
    starts_with_experts: bool


def _bucket(members: tuple[Parameter, ...], elements: int) -> Bucket:
    blocks = [one.layer for one in members if one.layer is not None]
    layers = [layer for layer in map(_layer_of, members) if layer is not None]
    block = min(blocks, default=None)
    names = {_matrix(one) for one in members if block is not None and one.layer == block}
    kinds = {one.kind for one in members}
    return Bucket(
        members,
        elements,
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
        self._filled: dict[Stage, list[Bucket]] = {}
        self._known: dict[tuple[bool, bool, str, str], Bucket] = {}
        self._sizes: dict[Stage, list[float]] = {}
        self._flats: dict[Stage, Flats] = {}
        self._launches: dict[Stage, list[Launch]] = {}
        self._sent: dict[tuple[Stage, int], float] = {}
        self._reductions: dict[tuple[Stage, float], tuple[float, float]] = {}

    def flats(self, stage: Stage) -> Flats:
        """Sizes of the buffers of a stage."""
        if stage not in self._flats:
            self._flats[stage] = self._fill(stage)
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
        for bucket, elements in zip(self._buckets(stage), self._bucket_sizes(stage), strict=True):
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
        for bucket, size in zip(self._buckets(stage), self._bucket_sizes(stage), strict=True):
            is_last = is_apart and bucket.starts_with_experts
            if not is_last and (bucket.lowest is None or bucket.lowest > first + block):
                sent += size
        return sent

    def _bucket_sizes(self, stage: Stage) -> list[float]:
        if stage not in self._sizes:
            self._sizes[stage] = [self._size(stage, bucket) for bucket in self._buckets(stage)]
        return self._sizes[stage]

    def _size(self, stage: Stage, bucket: Bucket) -> float:
        """Elements of a buffer; on a rank where there are experts, else before any cut."""
        if stage.tp == 1 and not bucket.has_experts:
            return float(bucket.elements)
        return sum(self._local(stage, one) for one in bucket.members)

    def _local(self, stage: Stage, one: Parameter) -> float:
        elements = self._elements[one.name]
        if one.kind in ("norm", "router", "position"):
            return float(elements)
        if one.kind != "expert":
            return elements / stage.tp
        here = one.shape[0] / stage.ep
        rows = -(-here // stage.expert_rows) * stage.expert_rows
        return rows * elements / one.shape[0]

    def _fill(self, stage: Stage) -> Flats:
        found = self._buckets(stage)
        # Where tp is larger than 1 norms have a small buffer of their own, which is launched after this one.
        held = self._held(stage)
        first = [one for one in held if one.kind not in ("norm", "router", "expert") or not stage.is_cut][-1]
        return Flats(
            each=tuple(self._flat(stage, bucket) for bucket in found),
            last_index=next(index for index, bucket in enumerate(found) if first in bucket.members),
            ends=sum(self._size(stage, bucket) for bucket in found if _is_end(bucket)),
            largest_parameter=max(self._local(stage, one) for one in held),
            expert_rows=stage.expert_rows,
        )

    def _flat(self, stage: Stage, bucket: Bucket) -> Flat:
        if not bucket.has_experts:
            size = self._size(stage, bucket)
            return Flat(size, size, 0.0, is_experts=False)
        unpadded = stage._replace(expert_rows=1)
        wholes = [self._local(unpadded, one) for one in bucket.members]
        sizes = [self._local(stage, one) for one in bucket.members]
        copies = sum(size for size, whole in zip(sizes, wholes, strict=True) if size > whole)
        is_experts = stage.sends_experts_last and bucket.starts_with_experts
        return Flat(sum(wholes), sum(sizes), copies, is_experts)

    def _held(self, stage: Stage) -> list[Parameter]:
        """The parameters of a stage from the last to the first; its blocks are the last of the model."""
        tied = self._before[:1] if self._model.tied_head and stage.has_head else []
        before = self._before if stage.has_embedding else tied
        blocks = self._blocks[self._model.num_layers - stage.num_layers :]
        after = self._after if stage.has_head else []
        return [*before, *(one for block in blocks for one in block), *after][::-1]

    def _buckets(self, stage: Stage) -> list[Bucket]:
        key = stage._replace(expert_rows=1)  # padding does not change what goes together
        if key not in self._filled:
            self._filled[key] = self._fill_buckets(key)
        return self._filled[key]

    def _fill_buckets(self, stage: Stage) -> list[Bucket]:
        runs: dict[tuple[bool, bool], list[Parameter]] = {}
        is_apart = stage.sends_experts_last
        for one in self._held(stage):
            is_last = is_apart and one.kind == "expert"
            is_uncut = stage.is_cut and one.kind in ("norm", "router", "position")
            runs.setdefault((is_last, is_uncut), []).append(one)
        return [bucket for kind in sorted(runs) for bucket in self._cut_runs(stage, runs[kind])]

    def _cut_runs(self, stage: Stage, run: list[Parameter]) -> list[Bucket]:
        found: list[Bucket] = []
        first = elements = 0
        kind = stage.is_cut, stage.sends_experts_last
        for end, one in enumerate(run, start=1):
            elements += self._elements[one.name]
            if elements >= BUCKET_ELEMENTS or end == len(run):
                # Stages of the same kind have most of their buckets in common.
                key = (*kind, run[first].name, one.name)
                if key not in self._known:
                    self._known[key] = _bucket(tuple(run[first:end]), elements)
                found.append(self._known[key])
                first, elements = end, 0
        return found


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
