"""What a packed dataset of chats holds: conversations with trained spans, and what a length would lose."""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from meshwright.data.packing import plan_packing
from meshwright.data.sources import TokenFile
from meshwright.data.tokenize import HuggingFaceTokenizer, tokenizer_of

# Alone, a span would lose the space with which its first word begins; a character has at most four tokens.
_TOKENS_BEFORE = 8


class Span(NamedTuple):
    """Successive tokens of one weight, as text with special tokens."""

    text: str
    weight: float
    """0: not trained."""


@dataclass(frozen=True)
class Conversation:
    """One document."""

    name: str
    spans: list[Span]
    num_tokens: int
    num_trained: int


@dataclass(frozen=True)
class TrainedShare:
    """Trained tokens of a dataset, and what a sequence length does to it."""

    num_tokens: int
    num_trained: int
    longest: int
    """Tokens of the longest sample; a pair counts as both of its answers."""
    num_longer: int
    """Samples longer than the sequence."""
    num_without_targets: int
    """Samples that would have no trained token within the sequence."""


@dataclass(frozen=True)
class WholePacking:
    """Sequences of one length that hold complete samples, a pair with both of its answers."""

    sequence_length: int
    num_sequences: int
    num_longer: int
    """Samples longer than the sequence: a run refuses the dataset."""
    whole_share: float
    """Share of positions with a token."""
    trained_share: float
    """Share of positions with a trained target."""
    padded_share: float
    """For comparison: share of positions with a token if each sample had its own, padded sequence."""


def whole_packing(dataset: TokenFile, sequence_length: int) -> WholePacking:
    """The sequences of a run on a dataset of chats, by best fit decreasing; longer samples are left out."""
    assert dataset.manifest.chat is not None
    is_pairs = dataset.manifest.chat.kind == "pairs"
    ends = dataset.document_ends[1::2] if is_pairs else dataset.document_ends
    lengths = np.diff(ends, prepend=0)
    fits = lengths <= sequence_length
    num_sequences = len(plan_packing(ends, sequence_length, chosen=fits)) if fits.any() else 0
    longer = np.flatnonzero(np.repeat(~fits, 2 if is_pairs else 1)).tolist()
    num_trained = dataset.manifest.chat.num_trained - sum(_num_trained(dataset, each) for each in longer)
    positions = max(1, num_sequences * sequence_length)
    return WholePacking(
        sequence_length=sequence_length,
        num_sequences=num_sequences,
        num_longer=int((~fits).sum()),
        whole_share=int(lengths[fits].sum()) / positions,
        trained_share=num_trained / positions,
        padded_share=int(lengths[fits].sum()) / max(1, int(fits.sum()) * sequence_length),
    )


def conversations(dataset: TokenFile, count: int) -> list[Conversation]:
    """The first documents of a dataset of chats."""
    tokenizer = tokenizer_of(dataset.folder, dataset.manifest.tokenizer)
    assert isinstance(tokenizer, HuggingFaceTokenizer) and dataset.manifest.chat is not None
    is_pairs = dataset.manifest.chat.kind == "pairs"
    shown = range(min(count * (1 + is_pairs), dataset.manifest.num_documents))
    return [_conversation(dataset, index, tokenizer, is_pairs=is_pairs) for index in shown]


def _conversation(
    dataset: TokenFile, index: int, tokenizer: HuggingFaceTokenizer, *, is_pairs: bool
) -> Conversation:
    assert dataset.loss_weights is not None
    tokens, end = dataset.document(index), int(dataset.document_ends[index])
    weights = dataset.loss_weights[end - len(tokens) : end].astype(np.float32)
    edges = [0, *(np.flatnonzero(np.diff(weights)) + 1).tolist(), len(tokens)]
    decode = tokenizer.decode_with_special
    spans = list[Span]()
    for begin, end in pairwise(edges):
        start = max(0, begin - _TOKENS_BEFORE)
        before, text = (decode(tokens[start:edge].tolist()) for edge in (begin, end))
        spans.append(Span(_continuation(before, text), float(weights[begin])))
    name = f"pair {index // 2}, {('chosen', 'rejected')[index % 2]}" if is_pairs else f"conversation {index}"
    return Conversation(name, spans, len(tokens), int(np.count_nonzero(weights[1:])))


def _continuation(before: str, text: str) -> str:
    """What a text adds to its begin, which may end inside a character."""
    begin = before if text.startswith(before) else before.rstrip("\ufffd")
    return text[len(begin) :]


def trained_share(dataset: TokenFile, sequence_length: int | None) -> TrainedShare:
    """The trained share of a dataset of chats; without a length nothing is too long."""
    assert dataset.manifest.chat is not None
    per_sample = 2 if dataset.manifest.chat.kind == "pairs" else 1
    lengths = np.diff(dataset.document_ends, prepend=0).reshape(-1, per_sample).sum(axis=1)
    limit = sequence_length or int(lengths.max())
    longer = np.flatnonzero(lengths > limit)
    share = limit // per_sample
    documents = longer[:, None] * per_sample + np.arange(per_sample)
    lost = [any(_num_trained(dataset, each, share) == 0 for each in sample) for sample in documents]
    return TrainedShare(
        num_tokens=int(dataset.document_ends[-1]),
        num_trained=dataset.manifest.chat.num_trained,
        longest=int(lengths.max()),
        num_longer=len(longer),
        num_without_targets=sum(lost),
    )


def _num_trained(dataset: TokenFile, document: int, limit: int | None = None) -> int:
    """Trained tokens of a document, or of its first ones; no array is as long as the dataset."""
    assert dataset.loss_weights is not None
    start, end = (int(dataset.document_ends[each]) if each >= 0 else 0 for each in (document - 1, document))
    end = end if limit is None else min(end, start + limit)
    return int(np.count_nonzero(dataset.loss_weights[start + 1 : end]))  # the first is never a target
