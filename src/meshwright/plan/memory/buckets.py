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
        """Where experts are summed over other ranks than the rest, their buffers come after all others."""
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
        self._filled: dict[Stage, list[list[Parameter]]] = {}
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
        sent = 0.0
        for bucket, elements in zip(self._buckets(stage), self._bucket_sizes(stage), strict=True):
            layers = [one.layer for one in bucket if one.layer is not None]
            is_last = stage.sends_experts_last and bucket[0].kind == "expert"
            if layers and not is_last and not any(one.kind == "embedding" for one in bucket):
                lowest = min(layers)
                names = {_matrix(one) for one in bucket if one.layer == lowest}
                last = next((name for name in reversed(ARRIVAL) if name in names), None)
                if last is not None:
                    found.append(Launch(lowest, last, elements, sent))
            sent += elements
        return found

    def sent_before(self, stage: Stage, block: int) -> float:
        """Elements of the buffers that are launched before the backward of a block of the stage begins."""
        if (stage, block) not in self._sent:
            self._sent[stage, block] = self._sum_before(stage, block)
        return self._sent[stage, block]

    def _sum_before(self, stage: Stage, block: int) -> float:
        first = self._model.num_layers - stage.num_layers
        sent = 0.0
        for bucket, size in zip(self._buckets(stage), self._bucket_sizes(stage), strict=True):
            is_last = stage.sends_experts_last and bucket[0].kind == "expert"
            layers = [layer for layer in map(_layer_of, bucket) if layer is not None]
            if not is_last and min(layers, default=first + block + 1) > first + block:
                sent += size
        return sent

    def _bucket_sizes(self, stage: Stage) -> list[float]:
        if stage not in self._sizes:
            self._sizes[stage] = [self._size(stage, bucket) for bucket in self._buckets(stage)]
        return self._sizes[stage]

    def _size(self, stage: Stage, bucket: list[Parameter]) -> float:
        """Elements of a buffer; on a rank where there are experts, else before any cut."""
        return sum(self._local(stage, one) for one in bucket)

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
            last_index=next(index for index, bucket in enumerate(found) if first in bucket),
            ends=sum(self._size(stage, bucket) for bucket in found if _is_end(bucket)),
            largest_parameter=max(self._local(stage, one) for bucket in found for one in bucket),
            expert_rows=stage.expert_rows,
        )

    def _flat(self, stage: Stage, bucket: list[Parameter]) -> Flat:
        unpadded = stage._replace(expert_rows=1)
        wholes = [self._local(unpadded, one) for one in bucket]
        sizes = [self._local(stage, one) for one in bucket]
        copies = sum(size for size, whole in zip(sizes, wholes, strict=True) if size > whole)
        is_experts = stage.sends_experts_last and bucket[0].kind == "expert"
        return Flat(sum(wholes), sum(sizes), copies, is_experts)

    def _held(self, stage: Stage) -> list[Parameter]:
        """The parameters of a stage from the last to the first; its blocks are the last of the model."""
        tied = self._before[:1] if self._model.tied_head and stage.has_head else []
        before = self._before if stage.has_embedding else tied
        blocks = self._blocks[self._model.num_layers - stage.num_layers :]
        after = self._after if stage.has_head else []
        return [*before, *(one for block in blocks for one in block), *after][::-1]

    def _buckets(self, stage: Stage) -> list[list[Parameter]]:
        key = stage._replace(expert_rows=1)  # padding does not change what goes together
        if key not in self._filled:
            self._filled[key] = self._fill_buckets(key)
        return self._filled[key]

    def _fill_buckets(self, stage: Stage) -> list[list[Parameter]]:
        runs: dict[tuple[bool, bool], list[Parameter]] = {}
        for one in self._held(stage):
            is_last = stage.sends_experts_last and one.kind == "expert"
            is_uncut = stage.is_cut and one.kind in ("norm", "router", "position")
            runs.setdefault((is_last, is_uncut), []).append(one)
        return [bucket for kind in sorted(runs) for bucket in self._cut_runs(runs[kind])]

    def _cut_runs(self, run: list[Parameter]) -> list[list[Parameter]]:
        found: list[list[Parameter]] = []
        bucket: list[Parameter] = []
        elements = 0
        for one in run:
            bucket.append(one)
            elements += self._elements[one.name]
            if elements >= BUCKET_ELEMENTS:
                found.append(bucket)
                bucket, elements = [], 0
        return [*found, bucket] if bucket else found


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


def _is_end(bucket: list[Parameter]) -> bool:
    return any(one.kind == "head" for one in bucket) and all(one.layer is None for one in bucket)
