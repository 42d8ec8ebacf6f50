"""The stream of samples of a run: the samples of its datasets, and which of them comes at each index.

A stream is a pure function of the run's spec and the content of its datasets. It does not depend on ranks,
workers or batches. Its `facts` say what it depends on, so that a saved position of another stream is refused
with a reason.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.data.blend import Blend, phases_of, plan_period
from meshwright.data.blended_samples import BlendedSamples, BlendOrder
from meshwright.data.chat.fit import is_pairs, require_chats_fit
from meshwright.data.corpus import generated_tokens
from meshwright.data.holdout import ReorderedSamples, held_out_documents, held_out_sequences
from meshwright.data.order import Blocks, Order, SampleOrder
from meshwright.data.packed_samples import PackedSamples
from meshwright.data.packing_cache import PLAN_VERSION, open_packing
from meshwright.data.pair_samples import PairSamples
from meshwright.data.readers.megatron import MegatronTokens, pair_of
from meshwright.data.samples import Samples, TokenSamples
from meshwright.data.sources import TokenFile, TokenSource
from meshwright.data.stream_position import fact_text, facts_number
from meshwright.errors import DataError
from meshwright.spec import BlendPartSpec, DataSpec
from meshwright.spec.data import BlockShuffleSpec


@dataclass(frozen=True)
class StreamPart:
    """One dataset of a stream."""

    samples: TokenSamples
    source: TokenSource
    num_training: int
    """Samples without those that are held out."""

    @property
    def held_out(self) -> NDArray[np.int64]:
        """Ids of the samples that are held out."""
        return np.arange(self.num_training, len(self.samples), dtype=np.int64)


@dataclass(frozen=True)
class Stream:
    """Samples, and their order."""

    samples: TokenSamples
    order: Order
    parts: tuple[StreamPart, ...]
    num_samples: int | None
    """Samples until the stream ends; None where it repeats without end."""
    held_out: NDArray[np.int64]
    """Ids of the samples that are kept for evaluation."""
    facts: Mapping[str, str]
    """What the order of samples depends on, by name."""
    number: int
    """A hash of the facts, 48 bits; equal for equal streams."""

    def drawn(self, count: int) -> list[int]:
        """Samples of each dataset among the first `count`."""
        count = count if self.num_samples is None else min(count, self.num_samples)
        return self.order.blend.drawn(count).tolist() if isinstance(self.order, BlendOrder) else [count]


def open_stream(spec: DataSpec, *, seed: int, vocab_size: int) -> Stream:
    """The stream of a spec; DataError when the datasets do not fit the spec or the model."""
    opened = [_open_samples(spec, source, vocab_size) for source in spec.sources]
    for one in opened:
        _require_vocabulary(one.source, vocab_size)
    _require_one_tokenizer([one.source for one in opened])
    parts = _held_out(spec, opened)
    return _blended(spec, parts, seed) if spec.blend else _single(spec, parts[0], seed)


def open_source(spec: DataSpec | BlendPartSpec, *, vocab_size: int | None = None) -> TokenSource:
    """The packed dataset, Megatron pair or generated corpus of a spec.

    `vocab_size` is that of the model. It bounds the tokens of a Megatron pair, which names no vocabulary.
    """
    if (spec.path is None) == (spec.synthetic is None):
        fact = "neither path nor synthetic is set" if spec.path is None else "both path and synthetic are set"
        hint = "set data.path to the folder of a packed dataset, or data.synthetic for a generated corpus"
        raise DataError(fact, where="data", hint=hint)
    if spec.synthetic is not None:
        return generated_tokens(spec.synthetic)
    path = Path(str(spec.path))
    if all(file.is_file() for file in pair_of(path)):
        return MegatronTokens(path, vocab_size=vocab_size)
    return TokenFile.open(path)


def tokenizer_hash(source: TokenSource) -> str:
    """The hash of the tokenizer of a packed dataset; a Megatron pair does not name its tokenizer."""
    if isinstance(source, MegatronTokens):
        return "not known"
    return source.manifest.tokenizer.hash if isinstance(source, TokenFile) else "generated"


def _single(spec: DataSpec, part: StreamPart, seed: int) -> Stream:
    order = _order(spec, part, seed, 0)
    facts = _facts(spec, (part,), seed)
    is_plain = spec.packing == "cut" and isinstance(spec.shuffle, bool) and spec.holdout is None
    return Stream(
        samples=part.samples,
        order=order,
        parts=(part,),
        num_samples=None if spec.max_epochs is None else spec.max_epochs * part.num_training,
        held_out=part.held_out,
        facts=facts,
        # The number that earlier versions wrote, so that their checkpoints go on.
        number=_plain_number(spec, part, seed) if is_plain else facts_number(facts),
    )


def _blended(spec: DataSpec, parts: tuple[StreamPart, ...], seed: int) -> Stream:
    samples = BlendedSamples([part.samples for part in parts])
    orders = [_order(spec, part, seed, number + 1) for number, part in enumerate(parts)]
    changes = [(spec.num_sequences(part.before_step), part.weights) for part in spec.curriculum]
    phases = phases_of([part.weight for part in spec.blend], changes)
    limits = [
        None if one.max_epochs is None else one.max_epochs * part.num_training
        for one, part in zip(spec.blend, parts, strict=True)
    ]
    blend = Blend(phases, limits)
    repeats = [one.max_epochs for one in spec.blend]
    facts = _facts(spec, parts, seed) | {"weights": fact_text(phases), "repeat": fact_text(repeats)}
    held_out = [part.held_out + samples.offsets[number] for number, part in enumerate(parts)]
    return Stream(
        samples=samples,
        order=BlendOrder(blend, orders, samples.offsets),
        parts=parts,
        num_samples=blend.num_samples,
        held_out=np.concatenate(held_out),
        facts=facts,
        number=facts_number(facts),
    )


class _Opened(NamedTuple):
    """The samples of one dataset."""

    source: TokenSource
    samples: TokenSamples
    num_training: int | None = None
    """Samples before those that a hash holds out; None without such a holdout."""


def _open_samples(spec: DataSpec, part: BlendPartSpec, vocab_size: int) -> _Opened:
    source = open_source(part, vocab_size=vocab_size)
    require_chats_fit(spec, source)
    if is_pairs(source) and spec.blend:
        hint = "train on them alone: data.path and preference"
        raise DataError("preference pairs cannot be blended", where=source.name, hint=hint)
    if is_pairs(source):
        return _Opened(source, PairSamples.open(source, spec.sequence_length))
    if spec.packing == "whole":
        held_out = None if spec.holdout is None else held_out_documents(source, spec.holdout)
        plan, num_training = open_packing(source, spec.sequence_length, held_out=held_out)
        packed = PackedSamples(source, spec.sequence_length, plan)
        return _Opened(source, packed, None if held_out is None else num_training)
    samples = Samples(source, spec.sequence_length, spec.documents == "separate")
    if len(samples) == 0:
        num_tokens = len(source.tokens)
        raise DataError(
            f"{num_tokens} tokens are fewer than one sequence and its target, {spec.sequence_length} + 1",
            where=source.name,
            hint=f"use data.sequence_length={max(1, num_tokens - 1)} or less, or more data",
        )
    if spec.holdout is None:
        return _Opened(source, samples)
    reordered = ReorderedSamples(samples, held_out_sequences(samples, spec.holdout))
    return _Opened(source, reordered, reordered.num_training)


def _held_out(spec: DataSpec, opened: list[_Opened]) -> tuple[StreamPart, ...]:
    """The parts of the stream: of a blend, samples are held out of each in proportion to the weights."""
    weights = [part.weight for part in spec.sources]
    counts = plan_period(weights).drawn(spec.holdout_sequences).tolist()
    parts: list[StreamPart] = []
    for (source, samples, num_training), count in zip(opened, counts, strict=True):
        if num_training is not None:
            parts.append(StreamPart(samples, source, num_training))
            continue
        if len(samples) <= count:
            raise DataError(
                f"holdout_sequences={spec.holdout_sequences} leaves nothing to train on: "
                f"the data has {len(samples)} sequences of {spec.sequence_length} tokens",
                where="data.holdout_sequences" if not spec.blend else source.name,
                hint=f"use {len(samples) - 1} or fewer" if not spec.blend else "hold out fewer sequences",
            )
        parts.append(StreamPart(samples, source, len(samples) - count))
    return tuple(parts)


def _order(spec: DataSpec, part: StreamPart, seed: int, source: int) -> SampleOrder:
    blocks = None
    if isinstance(spec.shuffle, BlockShuffleSpec):
        blocks = Blocks(spec.shuffle.block_samples, spec.shuffle.window_blocks)
    return SampleOrder(part.num_training, seed, spec.shuffle is not False, blocks, source)


def _facts(spec: DataSpec, parts: tuple[StreamPart, ...], seed: int) -> dict[str, str]:
    packing = spec.packing if spec.packing == "cut" else f"{spec.packing} v{PLAN_VERSION}"
    holdout = {} if spec.holdout is None else {"holdout": fact_text(spec.holdout)}
    return holdout | {
        "dataset fingerprint": fact_text([part.source.fingerprint for part in parts]),
        "tokenizer": fact_text([tokenizer_hash(part.source) for part in parts]),
        "seed": str(seed),
        "sequence_length": str(spec.sequence_length),
        "packing": packing,
        "shuffle": fact_text(spec.shuffle),
        "holdout_sequences": str(spec.holdout_sequences),
    }


def _plain_number(spec: DataSpec, part: StreamPart, seed: int) -> int:
    facts = (part.source.fingerprint, spec.sequence_length, part.num_training, spec.shuffle, seed)
    return int(hashlib.sha256(repr(facts).encode()).hexdigest()[:12], 16)


def _require_vocabulary(source: TokenSource, vocab_size: int) -> None:
    if source.vocab_size > vocab_size:
        raise DataError(
            f"the dataset's vocabulary has {source.vocab_size} tokens, the model's only {vocab_size}",
            where=source.name,
            hint=f"set model.vocab_size to {source.vocab_size} or more, or pack with the model's tokenizer",
        )


def _require_one_tokenizer(sources: list[TokenSource]) -> None:
    """Refuse a blend of datasets that different tokenizers packed."""
    files = [source for source in sources if isinstance(source, TokenFile)]
    for file in files[1:]:
        first, this = files[0].manifest.tokenizer, file.manifest.tokenizer
        if this.hash != first.hash:
            raise DataError(
                f"the dataset is packed with {this.name}, {files[0].name} with {first.name}",
                where=file.name,
                hint="pack all datasets of a blend with one tokenizer",
            )
