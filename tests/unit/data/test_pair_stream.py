"""Which runs read preference pairs."""

import pytest
from tests.support.pairs import pair_dataset

from meshwright.data.pair_samples import PairSamples
from meshwright.data.stream import open_stream
from meshwright.errors import DataError
from meshwright.spec import BlendPartSpec, DataSpec


def spec(**changes: object) -> DataSpec:
    return DataSpec(path=pair_dataset(), packing="whole", sequence_length=16, batch_sequences=2).with_(
        **changes
    )


def test_a_dataset_of_pairs_gives_rows_of_pairs():
    assert isinstance(open_stream(spec(), seed=0, vocab_size=70).samples, PairSamples)


def test_a_pair_longer_than_a_sequence_is_refused():
    with pytest.raises(DataError, match="pairs of answers are longer than"):
        open_stream(spec(sequence_length=8), seed=0, vocab_size=70)


def test_pairs_cannot_be_blended():
    parts = tuple(BlendPartSpec(path=pair_dataset(), weight=1) for _ in range(2))
    with pytest.raises(DataError, match="cannot be blended"):
        open_stream(spec(path=None, blend=parts), seed=0, vocab_size=70)
