"""A packed dataset on disk: opened without reading, and every kind of damage is an error."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from meshwright.data.pack import pack
from meshwright.data.sources import TokenFile, token_dtype
from meshwright.data.tokenize import ByteTokenizer
from meshwright.errors import DataError


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(f"the text of {name} " * 20)
    files = [tmp_path / f"{name}.txt" for name in "abc"]
    pack(files, tmp_path / "data", tokenizer=ByteTokenizer())
    return tmp_path / "data"


def edit(folder: Path, **changes: object) -> None:
    manifest = json.loads((folder / "dataset.json").read_text())
    (folder / "dataset.json").write_text(json.dumps({**manifest, **changes}))


def test_an_open_dataset_knows_itself(dataset: Path) -> None:
    tokens = TokenFile.open(dataset)
    assert tokens.manifest.num_documents == 3
    assert tokens.manifest.num_tokens == len(tokens.tokens) == 3 * (14 * 20 + 1)
    assert tokens.vocab_size == 257
    assert [Path(file).name for file in tokens.manifest.source_files] == ["a.txt", "b.txt", "c.txt"]
    assert ByteTokenizer().decode(tokens.document(1).tolist()) == "the text of b " * 20
    assert tokens.damage() == []


def test_the_fingerprint_is_of_the_content(dataset: Path, tmp_path: Path) -> None:
    pack(
        [tmp_path / "a.txt", tmp_path / "b.txt", tmp_path / "c.txt"],
        tmp_path / "same",
        tokenizer=ByteTokenizer(),
    )
    pack(
        [tmp_path / "b.txt", tmp_path / "a.txt", tmp_path / "c.txt"],
        tmp_path / "other",
        tokenizer=ByteTokenizer(),
    )
    same, other = TokenFile.open(tmp_path / "same"), TokenFile.open(tmp_path / "other")
    assert TokenFile.open(dataset).fingerprint == same.fingerprint != other.fingerprint


def truncate(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-3])


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def replace_manifest(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "dataset.json").write_text(text) and None


def shift_documents(folder: Path) -> None:
    ends = np.fromfile(folder / "documents.bin", dtype=np.int64)
    (ends - 1).tofile(folder / "documents.bin")


@pytest.mark.parametrize(
    ("damage", "fact"),
    [
        (truncate("tokens.bin"), "the file has 1683 bytes, dataset.json has 1686"),
        (truncate("documents.bin"), "the file has 21 bytes, dataset.json has 24"),
        (remove("tokens.bin"), "the file is missing"),
        (remove("documents.bin"), "the file is missing"),
        (remove("dataset.json"), "it has no dataset.json"),
        (replace_manifest("{"), "not a dataset description"),
        (replace_manifest("[" * 100_000), "not a dataset description"),
        (replace_manifest("[]"), "not a dataset description"),
        (lambda folder: edit(folder, version=99), "dataset version 99"),
        (lambda folder: edit(folder, dtype="float64"), "is not valid"),
        (lambda folder: edit(folder, num_tokens=0), "is not valid"),
        (lambda folder: edit(folder, num_tokens="many"), "num_tokens"),
        (lambda folder: edit(folder, sha256={}), "no hash of documents.bin, tokens.bin"),
        (shift_documents, "the last document ends at 842, but there are 843 tokens"),
    ],
)
def test_damage_is_an_error_when_opening(dataset: Path, damage: Callable[[Path], object], fact: str) -> None:
    damage(dataset)
    with pytest.raises(DataError, match=fact) as caught:
        TokenFile.open(dataset)
    assert caught.value.where.startswith(str(dataset))
    assert caught.value.hint


@pytest.mark.parametrize("name", ["tokens.bin", "documents.bin"])
def test_one_changed_bit_is_found_by_verifying(dataset: Path, name: str) -> None:
    content = bytearray((dataset / name).read_bytes())
    content[4] ^= 1
    (dataset / name).write_bytes(content)
    assert any(
        fact.startswith(f"{name}: sha256") for fact in TokenFile.open(dataset, check_content=False).damage()
    )


def test_verifying_finds_tokens_and_ends_that_cannot_be(dataset: Path) -> None:
    tokens = np.fromfile(dataset / "tokens.bin", dtype=np.uint16)
    tokens[7] = 999
    tokens.tofile(dataset / "tokens.bin")
    ends = np.fromfile(dataset / "documents.bin", dtype=np.int64)
    np.array([ends[1], ends[0], ends[2]]).tofile(dataset / "documents.bin")
    damage = "; ".join(TokenFile.open(dataset, check_content=False).damage())
    assert "token 999 is outside the vocabulary of 257 tokens" in damage
    assert "document ends do not increase" in damage


@pytest.mark.parametrize(
    ("vocab_size", "name"),
    [(2, "uint8"), (256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32")],
)
def test_the_type_is_the_smallest_that_holds_the_vocabulary(vocab_size: int, name: str) -> None:
    assert token_dtype(vocab_size).name == name


def test_a_vocabulary_beyond_32_bits_is_refused() -> None:
    with pytest.raises(DataError, match="does not fit 32 bits"):
        token_dtype(2**32 + 1)


def test_content_changed_after_packing_is_refused(dataset: Path) -> None:
    for name in ("tokens.bin", "documents.bin"):
        intact = (dataset / name).read_bytes()
        changed = bytearray(intact)
        changed[9] ^= 1
        (dataset / name).write_bytes(bytes(changed))
        with pytest.raises(DataError, match="changed after packing"):
            TokenFile.open(dataset)
        (dataset / name).write_bytes(intact)
    TokenFile.open(dataset)  # other modification times, the same content: a copy


def test_a_change_of_a_large_file_is_found_by_its_samples(dataset: Path, monkeypatch) -> None:
    monkeypatch.setattr("meshwright.data.file_check._MAX_FULL_HASH_BYTES", 0)
    content = bytearray((dataset / "tokens.bin").read_bytes())
    content[-1] ^= 1
    (dataset / "tokens.bin").write_bytes(bytes(content))
    with pytest.raises(DataError, match="changed after packing"):
        TokenFile.open(dataset)


def test_a_file_changed_in_use_is_an_error_and_no_crash(dataset: Path) -> None:
    opened = TokenFile.open(dataset)
    opened.require_unchanged()
    with (dataset / "tokens.bin").open("r+b") as file:
        file.truncate(5)
    with pytest.raises(DataError, match="it has 5 bytes"):
        opened.require_unchanged()
    (dataset / "tokens.bin").unlink()
    with pytest.raises(DataError, match="cannot be read"):
        opened.require_unchanged()
