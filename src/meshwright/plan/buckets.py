"""The flat buffers in which our runtime reduces gradients at ZeRO 0 to 2, as parallel/dp.py fills them.

Parameters join from the last to the first; a buffer is full at so many elements of whole parameters. Where
tp leaves a parameter uncut its gradient has another sum ahead of it, and dealt-out experts are summed over
other ranks, so each goes with its like.
"""

from typing import NamedTuple

import numpy as np

from meshwright.spec.model import ModelSpec
from meshwright.spec.parameters import Parameter, parameters

BUCKET_ELEMENTS = 25_000_000
ARRIVAL = ("down", "up", "gate", "output", "value", "key", "query")
"""In which order backward finds the gradients of a block's matrices."""


class Stage(NamedTuple):
    """What decides the buffers of a rank."""

    num_layers: int
    has_embedding: bool
    has_head: bool
    is_cut: bool
    """Whether tp is larger than 1."""
    deals_experts: bool = False
    """Whether ep is larger than 1."""


class Flats(NamedTuple):
    """Elements of the buffers of one stage, before any cut."""

    each: tuple[float, ...]
    """In the order in which they are sent off."""
    last: float
    """Of the buffer with the first parameters of the stage, which backward reaches last."""
    ends: float
    """Of buffers that are full before the last block's gradients come: the head's, when it is large."""
    largest_parameter: float

    @property
    def largest(self) -> float:
        """Of one buffer."""
        return max(self.each)

    def fullest_reduction(self, shards: float) -> float:
        """Elements held at the fullest moment when all buffers are sent off one after the other.

        A buffer, the gradients that were copied into it, and with ZeRO the shard that becomes of it.
        """
        sizes = np.array(self.each)
        sent = np.cumsum(sizes) - sizes
        part = 1.0 / shards if shards else 0.0
        return float((sizes.sum() - sent + sizes * (1.0 + part) + sent / max(shards, 1.0)).max())


class Launch(NamedTuple):
    """A flat buffer that is sent off within the backward of a block."""

    block: int
    """Blocks before the one that completes it."""
    name: str
    """Of the matrix whose gradient completes it."""
    elements: float
    sent: float
    """Elements sent off before."""


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
        self._after = [one for one in listed if one.layer is None and one not in self._before]
        self._flats: dict[Stage, Flats] = {}
        self._launches: dict[Stage, list[Launch]] = {}
        self._sent: dict[tuple[Stage, int], float] = {}

    def flats(self, stage: Stage) -> Flats:
        """Sizes of the buffers of a stage."""
        if stage not in self._flats:
            self._flats[stage] = self._fill(stage)
        return self._flats[stage]

    def launches(self, stage: Stage) -> list[Launch]:
        """The buffers that blocks complete, without the one that the embedding does."""
        if stage not in self._launches:
            self._launches[stage] = self._launched(stage)
        return self._launches[stage]

    def _launched(self, stage: Stage) -> list[Launch]:
        found: list[Launch] = []
        sent = 0.0
        for bucket in self._buckets(stage):
            elements = float(sum(one.num_elements for one in bucket))
            layers = [one.layer for one in bucket if one.layer is not None]
            if layers and not any(one.kind == "embedding" for one in bucket):
                names = {one.name.split(".")[-2] for one in bucket if one.layer == min(layers)}
                last = next((name for name in reversed(ARRIVAL) if name in names), None)
                if last is not None:
                    found.append(Launch(min(layers), last, elements, sent))
            sent += elements
        return found

    def sent_before(self, stage: Stage, block: int) -> float:
        """Elements of the buffers that are sent off before the backward of a block of the stage begins."""
        if (stage, block) not in self._sent:
            self._sent[stage, block] = self._sum_before(stage, block)
        return self._sent[stage, block]

    def _sum_before(self, stage: Stage, block: int) -> float:
        first = self._model.num_layers - stage.num_layers
        sent = 0.0
        for bucket in self._buckets(stage):
            layers = [_layer_of(one) for one in bucket]
            if all(layer is None or layer > first + block for layer in layers):
                sent += sum(one.num_elements for one in bucket)
        return sent

    def _fill(self, stage: Stage) -> Flats:
        found = self._buckets(stage)
        sizes = [float(sum(one.num_elements for one in bucket)) for bucket in found]
        # Where tp is larger than 1 norms have a small buffer of their own, which is sent off after this one.
        first = [one for one in self._held(stage) if one.kind != "norm" or not stage.is_cut][-1]
        return Flats(
            each=tuple(sizes),
            last=next(size for size, bucket in zip(sizes, found, strict=True) if first in bucket),
            ends=sum(size for size, bucket in zip(sizes, found, strict=True) if _is_end(bucket)),
            largest_parameter=float(max(one.num_elements for bucket in found for one in bucket)),
        )

    def _held(self, stage: Stage) -> list[Parameter]:
        """The parameters of a stage from the last to the first; its blocks are the last of the model."""
        tied = self._before[:1] if self._model.tied_head and stage.has_head else []
        before = self._before if stage.has_embedding else tied
        blocks = self._blocks[self._model.num_layers - stage.num_layers :]
        after = self._after if stage.has_head else []
        return [*before, *(one for block in blocks for one in block), *after][::-1]

    def _buckets(self, stage: Stage) -> list[list[Parameter]]:
        runs: dict[tuple[bool, bool], list[Parameter]] = {}
        for one in self._held(stage):
            is_dealt = stage.deals_experts and one.kind == "expert"
            is_uncut = stage.is_cut and one.kind in ("norm", "router", "position")
            runs.setdefault((is_dealt, is_uncut), []).append(one)
        return [bucket for kind in sorted(runs) for bucket in _filled(runs[kind])]


def _filled(run: list[Parameter]) -> list[list[Parameter]]:
    found: list[list[Parameter]] = []
    bucket: list[Parameter] = []
    elements = 0
    for one in run:
        bucket.append(one)
        elements += one.num_elements
        if elements >= BUCKET_ELEMENTS:
            found.append(bucket)
            bucket, elements = [], 0
    return [*found, bucket] if bucket else found


def _layer_of(one: Parameter) -> int | None:
    """What stands before the blocks counts as one more block before them."""
    return -1 if one.kind in ("embedding", "position") else one.layer


def _is_end(bucket: list[Parameter]) -> bool:
    return any(one.kind == "head" for one in bucket) and all(one.layer is None for one in bucket)
