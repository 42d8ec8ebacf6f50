"""What a packed dataset of chats holds: conversations with trained spans, and what a length would lose."""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.data.packing import plan_packing
from meshwright.data.sources import TokenFile
from meshwright.data.tokenize import HuggingFaceTokenizer, tokenizer_of


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
    assert dataset.loss_weights is not None and dataset.manifest.chat is not None
    ends = dataset.document_ends[1::2] if dataset.manifest.chat.kind == "pairs" else dataset.document_ends
    lengths = np.diff(ends, prepend=0)
    fits = lengths <= sequence_length
    num_sequences = len(plan_packing(ends, sequence_length, chosen=fits)) if fits.any() else 0
    is_target = dataset.loss_weights != 0
    is_target[np.concatenate([[0], dataset.document_ends[:-1]])] = False
    num_trained = int(is_target[np.repeat(fits, lengths)].sum())
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
    # The text up to each edge: alone, a span would lose the space with which its first word begins.
    texts = [tokenizer.decode_with_special(tokens[:edge].tolist()) for edge in edges]
    spans = [
        Span(_continuation(*both), float(weights[begin]))
        for begin, both in zip(edges, pairwise(texts), strict=False)
    ]
    name = f"pair {index // 2}, {('chosen', 'rejected')[index % 2]}" if is_pairs else f"conversation {index}"
    return Conversation(name, spans, len(tokens), int(np.count_nonzero(weights[1:])))


def _continuation(before: str, text: str) -> str:
    """What a text adds to its begin, which may end inside a character."""
    begin = before if text.startswith(before) else before.rstrip("\ufffd")
    return text[len(begin) :]


def trained_share(dataset: TokenFile, sequence_length: int | None) -> TrainedShare:
    """The trained share of a dataset of chats; without a length nothing is too long."""
    assert dataset.loss_weights is not None and dataset.manifest.chat is not None
    ends = dataset.document_ends
    starts = np.concatenate([[0], ends[:-1]])
    lengths = ends - starts
    needed = lengths.copy()
    is_pairs = dataset.manifest.chat.kind == "pairs"
    if is_pairs:
        needed = needed.reshape(-1, 2).sum(axis=1)
    limit = sequence_length or int(needed.max())
    share = limit // 2 if is_pairs else limit
    first = _first_trained(dataset.loss_weights, starts, ends)
    lost = first >= share
    lost = lost.reshape(-1, 2).any(axis=1) if is_pairs else lost
    return TrainedShare(
        num_tokens=int(ends[-1]),
        num_trained=dataset.manifest.chat.num_trained,
        longest=int(needed.max()),
        num_longer=int((needed > limit).sum()),
        num_without_targets=int((lost & (needed > limit)).sum()),
    )


def _first_trained(
    weights: NDArray[np.floating], starts: NDArray[np.int64], ends: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The place of the first trained token in each document; its length where there is none."""
    trained = np.append(np.flatnonzero(weights), ends[-1])
    found = trained[np.searchsorted(trained, starts + 1)]  # the first token is never a target
    return np.minimum(found, ends) - starts
