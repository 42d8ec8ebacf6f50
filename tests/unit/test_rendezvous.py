"""Where ranks meet: on the named interface, under a secret prefix, with a word about who is missing."""

import socket
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from meshwright import rendezvous
from meshwright.errors import LaunchError, RunError, SpecError
from meshwright.launch.launched import TORCHRUN, LaunchedRank
from meshwright.launch.meeting import StoreAddress, StoreFile
from meshwright.rendezvous import SECRET, meet, run_secret


def _rank(rank: int, num_ranks: int = 2, here: int | None = None) -> LaunchedRank:
    return LaunchedRank(TORCHRUN, rank, num_ranks, rank, here)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _at(port: int, host: str = "127.0.0.1") -> StoreAddress:
    return StoreAddress(host, port, False, "0", f"MASTER_ADDR={host} and MASTER_PORT={port}")


def _meet_both(meeting, run_dir=None) -> list[dist.Store]:
    with ThreadPoolExecutor(2) as pool:
        calls = [
            pool.submit(meet, _rank(rank), meeting, timeout_seconds=60, run_dir=run_dir) for rank in (1, 0)
        ]
        return [call.result(timeout=60) for call in calls]


def test_ranks_meet_on_the_named_interface_under_a_secret_and_can_meet_again(tmp_path):
    port = _free_port()
    one, other = _meet_both(_at(port), tmp_path)
    one.set("key", "first")
    assert other.get("key") == b"first"
    again, _ = _meet_both(_at(port), tmp_path)
    assert not again.check(["key"]), "a second world reads no keys of the first"
    secret = (tmp_path / ".secret").read_text()
    assert stat.S_IMODE((tmp_path / ".secret").stat().st_mode) == 0o600 and len(secret) == 32
    assert not list(tmp_path.glob(".secret-*"))
    outsider = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    outsider.set("key", "garbage")
    assert other.get("key") == b"first"
    with pytest.raises(ConnectionRefusedError):  # another address of this host: nobody listens there
        socket.create_connection(("127.0.0.2", port), timeout=5)


def test_a_file_needs_no_port_and_waiting_names_ranks_there_too(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(rendezvous, "_NOTICE_SECONDS", 0.3)
    with pytest.raises(RunError, match="rank 1 of 2 did not arrive"):
        meet(_rank(0), StoreFile(tmp_path / "lonely"), timeout_seconds=3)
    assert "rank 0 waits for rank 1 of 2" in capfd.readouterr().err
    one, other = _meet_both(StoreFile(tmp_path / "store"))
    one.set("key", "value")
    assert other.get("key") == b"value"


def test_a_secret_comes_from_the_environment_or_the_run_directory(tmp_path, monkeypatch):
    monkeypatch.delenv(SECRET, raising=False)
    assert run_secret(None) == ""
    assert run_secret(tmp_path / "run") == run_secret(tmp_path / "run") != ""
    monkeypatch.setenv(SECRET, "given")
    assert run_secret(None) == "given"
    monkeypatch.delenv(SECRET)
    (tmp_path / "file").write_text("")
    with pytest.raises(SpecError, match="cannot be written"):
        run_secret(tmp_path / "file")


def test_a_port_in_use_and_addresses_of_other_hosts_are_refused():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=f"port {port} of 127.0.0.1 is in use") as caught:
            meet(_rank(0), _at(port), timeout_seconds=5)
    assert caught.value.hint == "set MASTER_PORT to a free port"
    with pytest.raises(LaunchError, match=r"is not an address of .*, where rank 0 runs"):
        meet(_rank(0), _at(_free_port(), "192.0.2.1"), timeout_seconds=5)
    with pytest.raises(LaunchError, match="is no address of a host"):
        meet(_rank(0), _at(_free_port(), "no such host"), timeout_seconds=5)


def test_waiting_names_the_ranks_that_have_not_arrived(monkeypatch, capfd):
    monkeypatch.setattr(rendezvous, "_NOTICE_SECONDS", 0.3)
    port = _free_port()
    with pytest.raises(RunError, match="ranks 1, 3 of 4 did not arrive"):
        try:
            meet_late = ThreadPoolExecutor(1).submit(meet, _rank(2, 4), _at(port), timeout_seconds=3)
            meet(_rank(0, 4), _at(port), timeout_seconds=2)
        finally:
            assert isinstance(meet_late.exception(timeout=30), RunError)
    assert "rank 0 waits for ranks 1, 3 of 4" in capfd.readouterr().err
    with pytest.raises(RunError, match=r"rank 1 found nobody at 127\.0\.0\.1"):
        meet(_rank(1), _at(_free_port()), timeout_seconds=1)
    assert "rank 1 waits for rank 0 at 127.0.0.1 port" in capfd.readouterr().err
