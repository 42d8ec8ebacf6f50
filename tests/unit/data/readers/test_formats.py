"""Every format through one door: random access, the same after pickling, and damage named."""

import gzip
import io
import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.support.tar_shards import write_shards

from meshwright.data.readers import json_lines
from meshwright.data.readers.door import format_of, open_and_name, open_source
from meshwright.data.readers.extras import package
from meshwright.data.readers.megatron import MegatronTokens, write_megatron
from meshwright.data.readers.own import OwnDataset
from meshwright.data.readers.parquet import ParquetRows
from meshwright.data.readers.tar_index import build_index
from meshwright.data.records import RecordError
from meshwright.data.tokenize import ByteTokenizer
from meshwright.data.write import new_dataset
from meshwright.errors import DataError

TEXTS = [f"text number {number} " * (1 + number % 3) for number in range(20)]
TOKENS = [np.arange(3 + number, dtype=np.uint16) for number in range(20)]


def packed(path: Path) -> Path:
    with new_dataset(path / "packed", ByteTokenizer()) as writer:
        writer.append(TOKENS)
        writer.finish(["x"])
    return path / "packed"


def megatron(path: Path) -> Path:
    write_megatron(path / "corpus", iter(TOKENS), vocab_size=1000)
    return path / "corpus"


def lines(path: Path) -> Path:
    text = "\n".join(
        json.dumps({"text": text, "n": number, "ids": [1, 2]}) for number, text in enumerate(TEXTS)
    )
    (path / "a.jsonl").write_text("\n" + text + "\n\n")
    return path / "a.jsonl"


def parquet(path: Path) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({"text": TEXTS, "ids": [each.tolist() for each in TOKENS]})
    (path / "rows").mkdir()
    pq.write_table(table.slice(0, 12), path / "rows" / "0.parquet", row_group_size=5)
    pq.write_table(table.slice(12), path / "rows" / "1.parquet", row_group_size=5)
    return path / "rows"


def hugging_face(path: Path) -> Path:
    import datasets

    rows = datasets.Dataset.from_dict({"text": TEXTS, "ids": [each.tolist() for each in TOKENS]})
    rows.save_to_disk(path / "saved", num_shards=2)
    return path / "saved"


def lmdb_entries(path: Path) -> Path:
    import lmdb

    with (
        lmdb.open(str(path / "db"), map_size=1 << 24) as environment,
        environment.begin(write=True) as writer,
    ):
        writer.put(b"__len__", b"20")
        for number, text in enumerate(TEXTS):
            writer.put(f"{number:04d}".encode(), text.encode())
    return path / "db"


def hdf5(path: Path) -> Path:
    import h5py

    with h5py.File(path / "a.h5", "w") as file:
        file["text"] = TEXTS
        file["group/pixels"] = np.arange(20 * 6, dtype=np.uint8).reshape(20, 6)
        file["label"] = np.arange(20)
        file["elsewhere"] = h5py.ExternalLink("/etc/passwd", "x")
    return path / "a.h5"


def folder(path: Path) -> Path:
    for number, text in enumerate(TEXTS):
        name = path / "files" / ("cats" if number % 2 else "dogs") / f"{number:02d}"
        name.parent.mkdir(parents=True, exist_ok=True)
        name.with_suffix(".txt").write_text(text)
        name.with_suffix(".jpg").write_bytes(bytes([number]))
    (path / "files" / ".hidden").mkdir()
    (path / "files" / ".hidden" / "x.txt").write_text("no")
    return path / "files"


def tar(path: Path) -> Path:
    write_shards(path / "shards", num_shards=4, num_samples=5)
    build_index(path / "shards")
    return path / "shards"


FORMATS: dict[str, Callable[[Path], Path]] = {
    "packed tokens": packed,
    "Megatron tokens": megatron,
    "JSON lines": lines,
    "parquet rows": parquet,
    "Arrow rows": hugging_face,
    "LMDB entries": lmdb_entries,
    "HDF5 rows": hdf5,
    "files of a folder": folder,
    "tar shards": tar,
}


def plain(record: object) -> dict[str, object]:
    assert isinstance(record, dict)
    return {
        name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in record.items()
    }


@pytest.mark.filterwarnings("ignore")  # warnings of the packages that write the files
@pytest.mark.parametrize("kind", FORMATS)
def test_the_door_opens_every_format(tmp_path: Path, kind: str) -> None:
    opened = open_and_name(FORMATS[kind](tmp_path))
    assert opened.kind == kind
    source = opened.source
    assert len(source) == 20
    straight = [plain(source.record(index)) for index in range(20)]
    order = np.random.default_rng(0).permutation(20).tolist()
    assert [plain(source.record(index)) for index in order] == [straight[index] for index in order]
    assert len({record["__key__"] for record in straight}) == 20
    copy = pickle.loads(pickle.dumps(source))
    assert [plain(copy.record(index)) for index in order] == [straight[index] for index in order]
    assert copy.fingerprint == source.fingerprint
    lengths = source.lengths()
    assert lengths is None or len(lengths) == 20
    source.require_unchanged()
    texts = [record.get("text", record.get("txt", record.get("value"))) for record in straight]
    if kind not in ("packed tokens", "Megatron tokens", "tar shards", "files of a folder"):
        assert [text.decode() if isinstance(text, bytes) else text for text in texts] == TEXTS
    with pytest.raises(IndexError):
        source.record(20)


def test_rows_keep_numbers_and_arrays(tmp_path: Path) -> None:
    record = open_source(parquet(tmp_path)).record(13)
    assert isinstance(record["ids"], np.ndarray)
    assert record["ids"].tolist() == TOKENS[13].tolist()
    record = open_source(hdf5(tmp_path)).record(2)
    assert isinstance(record["group.pixels"], np.ndarray)
    assert (record["group.pixels"].tolist(), record["label"]) == ([12, 13, 14, 15, 16, 17], 2)
    assert "elsewhere" not in record  # a link to another file
    record = open_source(folder(tmp_path)).record(0)
    assert (record["__key__"], record["folder"], record["jpg"]) == ("cats/01", "cats", b"\x01")


def test_parquet_row_groups_are_blocks(tmp_path: Path) -> None:
    assert ParquetRows(parquet(tmp_path)).block_starts.tolist() == [0, 5, 10, 12, 17]


@pytest.mark.filterwarnings("ignore")
def test_hugging_face_splits_and_selections(tmp_path: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_dict({"text": TEXTS})
    splits = datasets.DatasetDict({"train": rows.select(range(15)), "test": rows.select(range(15, 20))})
    splits.save_to_disk(tmp_path / "both")
    assert open_source(tmp_path / "both", split="test").record(0)["text"] == TEXTS[15]
    with pytest.raises(DataError, match="none is chosen") as caught:
        open_source(tmp_path / "both")
    assert "train, test" in caught.value.hint


def test_megatron_pairs_are_token_sources(tmp_path: Path) -> None:
    source = MegatronTokens(megatron(tmp_path), vocab_size=1000)
    assert source.tokens.dtype == np.uint16
    assert source.document_ends.tolist() == np.cumsum([len(each) for each in TOKENS]).tolist()
    assert source.lengths().tolist() == [len(each) for each in TOKENS]
    assert source.damage() == []
    assert MegatronTokens(tmp_path / "corpus", vocab_size=10).damage() == [
        f"{tmp_path}/corpus.bin: token 10 at position 62 is outside the vocabulary of 10 tokens"
    ]
    with pytest.raises(DataError, match="exists already"):
        write_megatron(tmp_path / "corpus", iter(TOKENS), vocab_size=1000)
    write_megatron(tmp_path / "wide", iter(TOKENS), vocab_size=128_000)
    assert MegatronTokens(tmp_path / "wide").tokens.dtype == np.int32


def test_megatron_documents_of_several_sequences(tmp_path: Path) -> None:
    """A document may have several sequences, as with sentence splitting; document borders say which."""
    np.arange(10, dtype="<u2").tofile(tmp_path / "s.bin")
    head = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, 4, 3)
    lengths, pointers = np.array([3, 2, 0, 5], dtype="<i4"), np.array([0, 6, 10, 10], dtype="<i8")
    borders = np.array([0, 2, 4], dtype="<i8")
    (tmp_path / "s.idx").write_bytes(head + lengths.tobytes() + pointers.tobytes() + borders.tobytes())
    source = MegatronTokens(tmp_path / "s")
    assert source.document_ends.tolist() == [5, 10]
    assert source.record(1)["tokens"].tolist() == [5, 6, 7, 8, 9]  # pyright: ignore[reportAttributeAccessIssue]


def test_real_megatron_reads_and_writes_the_same(tmp_path: Path) -> None:
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    theirs = indexed.IndexedDataset(str(megatron(tmp_path)))
    assert [theirs[number].tolist() for number in range(20)] == [each.tolist() for each in TOKENS]
    import torch

    builder = indexed.IndexedDatasetBuilder(str(tmp_path / "m.bin"), dtype=np.uint16)
    for each in TOKENS:
        builder.add_document(torch.from_numpy(each.astype(np.int64)), [len(each)])
    builder.finalize(str(tmp_path / "m.idx"))
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"m.{suffix}").read_bytes() == (tmp_path / f"corpus.{suffix}").read_bytes()


@pytest.mark.parametrize(
    ("kind", "name", "text"),
    [
        ("Megatron tokens", "corpus.bin", "the index ends at byte"),
        ("parquet rows", "rows/1.parquet", "no complete parquet file"),
        ("HDF5 rows", "a.h5", "no complete HDF5 file"),
    ],
)
def test_truncated_files_are_named(tmp_path: Path, kind: str, name: str, text: str) -> None:
    path = FORMATS[kind](tmp_path)
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[: len(content) // 2 // 2 * 2])
    with pytest.raises(DataError, match=text) as caught:
        source = open_source(path)
        [source.record(index) for index in range(20)]
    assert str(tmp_path) in caught.value.where


def test_broken_lines_are_named_with_their_number(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"text": \n[1]\n')
    source = open_source(tmp_path / "a.jsonl")
    assert source.record(0)["text"] == "one"
    with pytest.raises(RecordError, match="not JSON") as caught:
        source.record(1)
    assert (caught.value.file, caught.value.offset) == (f"{tmp_path}/a.jsonl:3", 17)
    with pytest.raises(RecordError, match="a JSON list"):
        source.record(2)


def test_large_line_files_need_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = lines(tmp_path)
    before = [plain(open_source(path).record(index)) for index in range(20)]
    monkeypatch.setattr(json_lines, "_MAX_INDEXED_AT_START", 10)
    with pytest.raises(DataError, match="no current index"):
        open_source(path)
    assert json_lines.write_line_index(path) == 20
    assert [plain(open_source(path).record(index)) for index in range(20)] == before
    with path.open("a") as file:
        file.write('{"text": "more"}\n')
    with pytest.raises(DataError, match="no current index"):
        open_source(path)


def test_a_changed_file_is_noticed(tmp_path: Path) -> None:
    path = lines(tmp_path)
    source = open_source(path)
    with path.open("a") as file:
        file.write("{}\n")
    with pytest.raises(DataError, match="changed while it was in use"):
        source.require_unchanged()


def test_what_is_not_known_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.xyz").write_bytes(b"1")
    with pytest.raises(DataError, match=r"ends with \.xyz"):
        open_source(tmp_path / "a.xyz")
    with pytest.raises(DataError, match="no such file"):
        open_source(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no file of a known format"):
        open_source(tmp_path / "empty")
    write_shards(tmp_path / "bare")
    with pytest.raises(DataError, match="no index") as caught:
        open_source(tmp_path / "bare")
    assert f"data index {tmp_path}/bare" in caught.value.hint
    with pytest.raises(DataError, match="have no splits"):
        open_source(lines(tmp_path), split="train")
    assert format_of(tmp_path / "a.jsonl") == "JSON lines"


def test_a_missing_package_is_said_with_the_way_to_install_it() -> None:
    with pytest.raises(DataError, match="package nothing_of_this_name, which is not installed") as caught:
        package("nothing_of_this_name.part", extra="parquet", needed_for="parquet files")
    assert caught.value.hint == 'pip install "meshwright[parquet]"'


def test_ones_own_dataset() -> None:
    class Squares:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> tuple[int, list[int]]:
            if index == 2:
                raise ValueError("broken")
            return index, [index * index]

    source = OwnDataset(
        Squares(), fingerprint="v1", fields=("n", "square"), length_of=lambda index: index + 1
    )
    assert plain(dict(source.record(1))) == {"__key__": "1", "n": 1, "square": [1]}
    assert source.lengths().tolist() == [1, 2, 3]  # pyright: ignore[reportOptionalMemberAccess]
    with pytest.raises(RecordError, match="raised ValueError: broken"):
        source.record(2)
    assert OwnDataset([{"text": "a"}], fingerprint="1").record(0) == {"__key__": "0", "text": "a"}
    with pytest.raises(DataError, match="no map-style dataset"):
        OwnDataset(iter([1]), fingerprint="1")  # pyright: ignore[reportArgumentType]


def test_no_code_in_files_is_executed(tmp_path: Path) -> None:
    """A pickle in an LMDB value or an .npy field stays bytes, or is refused."""
    import lmdb

    from meshwright.data.decode import decode_npy

    class Bomb:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (tmp_path / "executed",)

    with (
        lmdb.open(str(tmp_path / "db"), map_size=1 << 20) as environment,
        environment.begin(write=True) as writer,
    ):
        writer.put(b"__keys__", pickle.dumps(Bomb()))
        writer.put(b"1", pickle.dumps(Bomb()))
    assert isinstance(open_source(tmp_path / "db").record(0)["value"], bytes)
    stream = io.BytesIO()
    np.save(stream, np.array([Bomb()], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="allow_pickle"):
        decode_npy(stream.getvalue())
    assert not (tmp_path / "executed").exists()


def test_compressed_lines_are_sources_of_packing_only(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write("{}\n")
    with pytest.raises(DataError, match="data pack"):
        open_source(tmp_path / "a.jsonl.gz")
