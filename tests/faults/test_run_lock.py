"""One writer for one run directory."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshwright.errors import SpecError
from meshwright.resilience import run_lock as module
from meshwright.resilience.run_lock import LOCK, STALE_SECONDS, release_lost_lock, run_lock

HOLD = """
import sys, time
from pathlib import Path
from meshwright.resilience.run_lock import run_lock
with run_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path: Path):
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline() == b"held\n"
        yield process
        process.kill()


def test_a_second_writer_is_refused_and_a_dead_owner_is_followed(tmp_path, holder, capfd):
    refused = pytest.raises(SpecError, match=f"process {holder.pid} on .* is training into this directory")
    with refused, run_lock(tmp_path):
        raise AssertionError
    holder.kill()
    holder.wait()
    with run_lock(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    assert f"took over {tmp_path} from process {holder.pid}" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []  # nothing is left behind


def test_a_process_id_that_was_given_away_again_is_no_owner(tmp_path, holder):
    owner = json.loads((tmp_path / LOCK).read_text())
    (tmp_path / LOCK).write_text(json.dumps({**owner, "started_at": owner["started_at"] - 50.0}))
    with run_lock(tmp_path):
        pass


def test_an_owner_on_another_host_lives_while_it_touches_the_lock(tmp_path):
    (tmp_path / LOCK).write_text(json.dumps({"host": "elsewhere", "boot": 1, "pid": 7, "started_at": 1.0}))
    with pytest.raises(SpecError, match="process 7 on elsewhere"), run_lock(tmp_path):
        raise AssertionError
    long_ago = time.time() - STALE_SECONDS - 5
    os.utime(tmp_path / LOCK, (long_ago, long_ago))
    with run_lock(tmp_path):
        pass


def test_the_owner_touches_its_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "TOUCH_SECONDS", 0.02)
    with run_lock(tmp_path):
        os.utime(tmp_path / LOCK, (1.0, 1.0))
        deadline = time.monotonic() + 120
        while (tmp_path / LOCK).stat().st_mtime == 1.0:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.mark.parametrize("text", ("", "[]", "{", '{"pid": "x"}'))
def test_a_damaged_lock_ends_after_a_while(tmp_path, text):
    (tmp_path / LOCK).write_text(text)
    with pytest.raises(SpecError), run_lock(tmp_path):
        raise AssertionError
    os.utime(tmp_path / LOCK, (1.0, 1.0))
    with run_lock(tmp_path):
        pass


def test_a_lock_that_was_taken_over_is_not_removed(tmp_path):
    with run_lock(tmp_path):
        (tmp_path / LOCK).write_text(json.dumps({"host": "elsewhere", "pid": 7}))
    assert (tmp_path / LOCK).exists()


def test_the_lock_of_a_lost_host_is_released(tmp_path):
    lock = tmp_path / LOCK
    lock.write_text(json.dumps({"host": "far", "boot": 1, "pid": 1, "started_at": 1.0}))
    release_lost_lock(tmp_path, {"other"})
    assert lock.exists()
    release_lost_lock(tmp_path, {"far"})
    assert not lock.exists()
    release_lost_lock(tmp_path, {"far"})
