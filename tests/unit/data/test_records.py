"""Records, and the errors that name one."""

import pickle

import numpy as np

from meshwright.data.records import RecordError, RecordsInMemory


def test_error_names_file_offset_and_key_and_pickles() -> None:
    error = RecordError("truncated JPEG", file="a.tar", offset=512, key="0007", hint="index it again")
    assert str(error) == "a.tar, offset 512, key 0007: truncated JPEG\n  hint: index it again"
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.file, copy.offset, copy.key) == (str(error), "a.tar", 512, "0007")


def test_fingerprint_follows_content_and_order() -> None:
    first = [{"txt": "a"}, {"txt": "b", "tokens": np.arange(3)}]
    assert (
        RecordsInMemory("x", first).fingerprint == RecordsInMemory("y", [dict(r) for r in first]).fingerprint
    )
    for other in ([first[1], first[0]], [{"txt": "a"}, {"txt": "b", "tokens": np.arange(3) + 1}], first[:1]):
        assert RecordsInMemory("x", other).fingerprint != RecordsInMemory("x", first).fingerprint


def test_lengths_of_a_field() -> None:
    records = RecordsInMemory("x", [{"tokens": np.arange(3)}, {"tokens": np.arange(5)}], "tokens")
    assert records.lengths().tolist() == [3, 5]  # pyright: ignore[reportOptionalMemberAccess]
