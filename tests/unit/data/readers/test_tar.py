"""Tar shards: the record of any index, Energon's files both ways, and shards that were changed or damaged."""

import json
import os
import pickle
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
from tests.support.tar_shards import write_shards, write_tar

from meshwright.data.readers import energon, tar_index
from meshwright.data.readers.tar import TarShards
from meshwright.data.readers.tar_index import build_index, index_differences
from meshwright.data.records import RecordError
from meshwright.errors import DataError


def records_of(source: TarShards) -> list[dict[str, object]]:
    return [dict(source.record(index)) for index in range(len(source))]


def as_tarfile_reads(folder: Path) -> list[dict[str, object]]:
    """The oracle: every shard through the standard library, member by member."""
    found: list[dict[str, object]] = []
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                if not member.isreg() or member.name.startswith("__"):
                    continue
                folder_name, _, name = member.name.rpartition("/")
                stem, _, field = name.partition(".")
                key = f"{folder_name}/{stem}" if folder_name else stem
                if not found or found[-1]["__key__"] != key:
                    found.append({"__key__": key})
                opened = tar.extractfile(member)
                assert opened is not None
                found[-1][field] = opened.read()
    return found


@pytest.mark.parametrize("access", ["map", "read"])
@pytest.mark.parametrize("with_table", [True, False], ids=["ours", "energon"])
def test_any_index_gives_what_tarfile_reads(tmp_path: Path, access: str, with_table: bool) -> None:
    folder = write_shards(tmp_path / "data")
    result = build_index(folder)
    assert (result.num_shards, result.num_samples) == (3, 12)
    if not with_table:
        (folder / ".nv-meta" / tar_index.FACTS_FILE).unlink()
    source = TarShards(folder, access=access)  # pyright: ignore[reportArgumentType]
    assert records_of(source) == as_tarfile_reads(folder)
    assert (
        source.lengths().tolist()
        == np.concatenate(
            [np.diff(np.fromfile(path, dtype="<u8").astype(int)) for path in sorted(folder.glob("*.idx"))]
        ).tolist()
    )
    with pytest.raises(IndexError):
        source.record(12)


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_folders_and_members_about_the_archive(tmp_path: Path, kind: int) -> None:
    deep = "/".join(["a long folder name"] * 9)
    files = {
        "__meta__/about.json": b"{}",
        f"{deep}/one.jpg": b"1" * 700,
        f"{deep}/one.cap.txt": b"first",
        "b/zwei.größe.txt": b"zweite",
        "b/zwei.jpg": b"",
    }
    write_tar(tmp_path / "data" / "x.tar", files, kind=kind)
    build_index(tmp_path / "data")
    for access in ("map", "read"):
        source = TarShards(tmp_path / "data", access=access)
        assert records_of(source) == as_tarfile_reads(tmp_path / "data")
        assert [record["__key__"] for record in records_of(source)] == [f"{deep}/one", "b/zwei"]
    assert index_differences(tmp_path / "data", "x.tar") == []


def test_samples_with_different_fields(tmp_path: Path) -> None:
    write_tar(tmp_path / "x.tar", {"a.jpg": b"1", "a.txt": b"2", "b.jpg": b"3", "c.txt": b"4", "c.jpg": b"5"})
    build_index(tmp_path)
    assert records_of(TarShards(tmp_path)) == as_tarfile_reads(tmp_path)


def test_the_index_is_that_of_energon(tmp_path: Path) -> None:
    folder = write_shards(tmp_path, num_shards=2)
    build_index(folder)
    offsets = np.fromfile(folder / "shard-0000.tar.idx", dtype="<u8")
    with tarfile.open(folder / "shard-0000.tar") as tar:
        members = tar.getmembers()
        assert offsets.tolist() == [member.offset for member in members[::2]] + [tar.offset]
    meta = folder / ".nv-meta"
    assert json.loads((meta / ".info.json").read_text()) == {
        "shard_counts": {"shard-0000.tar": 4, "shard-0001.tar": 4}
    }
    assert {path.name for path in meta.iterdir()} >= {
        ".info.json",
        "split.yaml",
        "dataset.yaml",
        "index.sqlite",
        "index.uuid",
    }
    import sqlite3

    rows = sqlite3.connect(meta / "index.sqlite").execute(
        "SELECT tar_file_id, sample_key FROM samples WHERE sample_index = 1"
    )
    second = [(0, "00000001"), (1, "00000005")]
    assert [(row[0], row[1]) for row in rows.fetchall()] == second


def test_splits_braces_and_exclusions(tmp_path: Path) -> None:
    folder = write_shards(tmp_path)
    build_index(folder)
    (folder / ".nv-meta" / "split.yaml").write_text(
        "split_parts:\n  train: ['shard-{0000..0001}.tar']\n  val: ['shard-0002.tar']\n"
        "exclude: ['shard-0000.tar/1']\n"
    )
    assert [r["__key__"] for r in records_of(TarShards(folder, split="val"))] == [
        f"{number:08d}" for number in range(8, 12)
    ]
    assert [r["__key__"] for r in records_of(TarShards(folder, split="train"))] == [
        f"{number:08d}" for number in (0, 2, 3, 4, 5, 6, 7)
    ]
    with pytest.raises(DataError, match="no split 'test'"):
        TarShards(folder, split="test")
    build_index(folder)  # an edited split file stays
    assert "val: ['shard-0002.tar']" in (folder / ".nv-meta" / "split.yaml").read_text()
    assert list(energon.expand_braces("a{1..3}{x,y}")) == ["a1x", "a1y", "a2x", "a2y", "a3x", "a3y"]


def test_a_second_call_indexes_only_what_is_new(tmp_path: Path) -> None:
    folder = write_shards(tmp_path)
    build_index(folder)
    write_tar(folder / "shard-0009.tar", {"new.bin": b"1", "new.txt": b"2"})
    result = build_index(folder)
    assert (result.num_shards, result.num_reused, result.num_samples) == (4, 3, 13)
    assert TarShards(folder, split="train").record(12)["__key__"] == "new"


def test_a_kill_costs_at_most_the_shards_in_flight(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "data", num_shards=40)
    code = f"""
import time
from pathlib import Path
from meshwright.data.readers import tar_index
def slowly(num_bytes):
    print("shard", flush=True)
    time.sleep(0.05)
tar_index.build_index(Path({str(folder)!r}), progress=slowly)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    for _ in range(5):
        process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    with pytest.raises(DataError, match="missing"):  # not there until it is complete
        TarShards(folder)
    assert build_index(folder).num_reused >= 4
    assert records_of(TarShards(folder)) == as_tarfile_reads(folder)


def test_processes_give_the_same_index(tmp_path: Path) -> None:
    one, two = write_shards(tmp_path / "one"), write_shards(tmp_path / "two")
    build_index(one)
    build_index(two, num_processes=2)
    for path in one.glob("*.idx"):
        assert path.read_bytes() == (two / path.name).read_bytes()


def test_a_changed_shard_is_refused(tmp_path: Path) -> None:
    folder = write_shards(tmp_path)
    build_index(folder)
    source = TarShards(folder)
    source.require_unchanged()
    path = folder / "shard-0001.tar"
    content = bytearray(path.read_bytes())
    content[1000] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match="changed while it was in use"):
        source.require_unchanged()
    with pytest.raises(DataError, match="changed since it was indexed") as caught:
        TarShards(folder).record(5)
    assert "data index" in caught.value.hint
    path.write_bytes(content[:-512])
    with pytest.raises(DataError, match="when it was indexed"):
        TarShards(folder)


def test_a_copied_shard_is_accepted(tmp_path: Path) -> None:
    folder = write_shards(tmp_path)
    build_index(folder)
    for path in folder.glob("*.tar"):
        os.utime(path, ns=(time.time_ns(), time.time_ns() - 10**12))
    assert records_of(TarShards(folder)) == as_tarfile_reads(folder)


def test_damage_is_named(tmp_path: Path) -> None:
    content = write_tar(
        tmp_path / "a" / "x.tar", {"one.jpg": b"1" * 5000, "two.jpg": b"2" * 5000}
    ).read_bytes()
    (tmp_path / "a" / "x.tar").write_bytes(content[:6000])
    with pytest.raises(RecordError, match="in the middle of a header"):
        build_index(tmp_path / "a")
    (tmp_path / "a" / "x.tar").write_bytes(content[:7000])
    with pytest.raises(RecordError, match="truncated") as caught:
        build_index(tmp_path / "a")
    assert (caught.value.offset, caught.value.key) == (5632, "two.jpg")
    (tmp_path / "a" / "x.tar").write_bytes(content[:5632] + b"?" * 6000)
    with pytest.raises(RecordError, match="no valid tar header"):
        build_index(tmp_path / "a")
    (tmp_path / "a" / "x.tar").write_bytes(b"")
    with pytest.raises(RecordError, match="an empty file"):
        build_index(tmp_path / "a")
    write_tar(tmp_path / "b" / "x.tar", {})
    with pytest.raises(RecordError, match="holds no sample"):
        build_index(tmp_path / "b")
    write_tar(tmp_path / "c" / "x.tar", {"a.jpg": b"1", "b.jpg": b"2", "a.txt": b"3"})
    with pytest.raises(RecordError, match="occurs again"):
        build_index(tmp_path / "c")
    for shard in "xy":
        write_tar(tmp_path / "d" / f"{shard}.tar", {"same.jpg": b"1"})
    with pytest.raises(DataError, match="two samples have the key 'same'"):
        build_index(tmp_path / "d")


def test_verification_finds_an_index_of_another_shard(tmp_path: Path) -> None:
    folder = write_shards(tmp_path)
    build_index(folder)
    assert index_differences(folder, "shard-0001.tar") == []
    offsets = np.fromfile(folder / "shard-0001.tar.idx", dtype="<u8")
    (offsets + np.uint64(512)).tofile(folder / "shard-0001.tar.idx")
    assert "sample 0 begins at 0, the index has 512" in index_differences(folder, "shard-0001.tar")[0]
    (folder / ".nv-meta" / tar_index.FACTS_FILE).unlink()
    with pytest.raises(DataError, match="index"):
        [TarShards(folder).record(index) for index in range(4, 8)]


def test_a_source_goes_to_worker_processes(tmp_path: Path) -> None:
    folder = write_shards(tmp_path)
    build_index(folder)
    source = TarShards(folder)
    copy = pickle.loads(pickle.dumps(source))
    assert records_of(copy) == records_of(source)
    assert copy.fingerprint == source.fingerprint


def test_few_files_are_open_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_shards(tmp_path, num_shards=8)
    build_index(folder)
    monkeypatch.setattr("meshwright.data.readers.tar._MAX_OPEN", 2)
    source = TarShards(folder)
    assert records_of(source) == as_tarfile_reads(folder)
    assert len(source._open) == 2


def test_the_fingerprint_follows_content_and_order(tmp_path: Path) -> None:
    first, second = write_shards(tmp_path / "1"), write_shards(tmp_path / "2", num_samples=5)
    build_index(first)
    build_index(second)
    assert TarShards(first).fingerprint == TarShards(first).fingerprint != TarShards(second).fingerprint


def test_real_energon_writes_the_same_index(tmp_path: Path) -> None:
    prepare = pytest.importorskip("megatron.energon.flavors.webdataset.prepare")
    ours, theirs = write_shards(tmp_path / "ours"), write_shards(tmp_path / "theirs")
    build_index(ours)
    names = sorted(path.name for path in theirs.glob("*.tar"))
    prepare.WebdatasetPreparator.prepare_dataset(theirs, names, split_parts_ratio=[("train", 1.0)], workers=1)
    for name in names:
        assert (ours / f"{name}.idx").read_bytes() == (theirs / f"{name}.idx").read_bytes()
    assert records_of(TarShards(theirs)) == records_of(TarShards(ours))
