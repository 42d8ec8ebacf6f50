"""Whether a dataset of chats fits the settings of a run: no conversation is split, and none sees another."""

import numpy as np

from meshwright.data.sources import TokenFile, TokenSource
from meshwright.errors import DataError
from meshwright.spec import DataSpec


def is_pairs(source: TokenSource) -> bool:
    """Whether a dataset holds preference pairs."""
    chat = source.manifest.chat if isinstance(source, TokenFile) else None
    return chat is not None and chat.kind == "pairs"


def require_chats_fit(spec: DataSpec, source: TokenSource) -> None:
    """DataError where a dataset of chats would be cut, joined or split; any other dataset fits."""
    chat = source.manifest.chat if isinstance(source, TokenFile) else None
    if chat is None:
        return
    if spec.packing != "whole":
        fact = "the dataset holds chats, and data.packing=cut would cut them at the ends of sequences"
        raise DataError(fact, where=source.name, hint="set data.packing: whole")
    lengths = np.diff(source.document_ends, prepend=0)
    lengths = lengths.reshape(-1, 2).sum(axis=1) if chat.kind == "pairs" else lengths
    longer = int((lengths > spec.sequence_length).sum())
    if longer:
        longest = int(lengths.max())
        what = "pairs of answers" if chat.kind == "pairs" else "conversations"
        raise DataError(
            f"{longer:,} of {len(lengths):,} {what} are longer than data.sequence_length="
            f"{spec.sequence_length}; the longest has {longest:,} tokens",
            where=source.name,
            hint=f"use data.sequence_length={longest} or more, or pack again with --seq "
            f"{spec.sequence_length} --longer drop",
        )
