"""`meshwright watch` as a user starts it: page, data, stream, Prometheus, and who is let in."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.watched_runs import watching, write_run, write_steps

from meshwright.cli import watch as watch_verb
from meshwright.cli.main import run as run_cli


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "base")


@pytest.fixture(scope="module")
def address(run_dir: Path) -> Iterator[str]:
    with watching(str(run_dir)) as found:
        yield found


def get(address: str, path: str = "", **headers: str) -> tuple[Any, str]:
    request = urllib.request.Request(address + path, headers=headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return answer.headers, answer.read().decode()


def refused(address: str, path: str = "", **headers: str) -> int:
    """The status of an answer that is an error."""
    with pytest.raises(urllib.error.HTTPError) as answer:
        get(address, path, **headers)
    answer.value.close()
    return answer.value.code


def run_when(address: str, is_ready: Any) -> dict[str, Any]:
    deadline = time.monotonic() + 120
    while True:
        run = json.loads(get(address, "api/runs")[1])["runs"][0]
        if is_ready(run):
            return run
        assert time.monotonic() < deadline, run
        time.sleep(0.1)


def test_the_page_is_one_file_that_loads_nothing(address: str):
    headers, page = get(address)
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "") and "https://" not in page
    assert page.count("<script") == 1 and "src=" not in page.split("<script")[1].split(">")[0]


def test_a_run_is_shown_against_its_prediction(address: str):
    run = run_when(address, lambda run: run["predicted"]["mfu"])
    assert (run["name"], run["state"], run["step"], run["num_steps"]) == ("base", "incomplete", 60, 100)
    assert run["latest"]["loss"] == pytest.approx(10 / 60)
    assert run["predicted"]["text"] == "predicted for h100, 8 devices"
    assert 0.2 < run["predicted"]["mfu"] < 0.7 and 4e10 < run["predicted"]["peak_bytes"] < 8e10
    assert 0 < run["predicted"]["communication_share"] < 0.5
    assert run["eta_seconds"] is None  # nobody works on it
    assert "dp_shard=8" in run["subtitle"]


def test_curves_are_down_sampled_and_cut(address: str):
    run_when(address, lambda run: run["step"] == 60)
    found = json.loads(get(address, "api/curves?run=0&points=10")[1])
    assert len(found["curves"]["loss"]["steps"]) == 10 and max(found["curves"]["loss"]["high"]) == 10.0
    assert found["marks"]["checkpoint"] == [20]
    part = json.loads(get(address, "api/curves?run=0&first=11&last=14")[1])
    assert part["curves"]["loss"]["steps"] == [11, 12, 13, 14]
    assert part["curves"]["eval_loss"]["steps"] == []


def test_the_slow_rank_comes_first(address: str):
    run_when(address, lambda run: run["step"] == 60)
    found = json.loads(get(address, "api/details?run=0")[1])
    assert found["ranks"]["order"][0] == 5 and found["ranks"]["medians"][0] == 6.0
    assert len(found["ranks"]["peak_bytes"]) == 8
    assert [kind for _, kind, _ in found["events"]] == ["warning", "checkpoint", "start"]


def test_prometheus_reads_gauges(address: str):
    run_when(address, lambda run: run["step"] == 60)
    headers, text = get(address, "metrics")
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    names = [line.split("{")[0] for line in lines]
    assert len(set(names)) == len(names) and "meshwright_mfu" in names
    assert any(line.startswith('meshwright_step{run="base"') and line.endswith(" 60") for line in lines)
    assert any(line.startswith("meshwright_up") and line.endswith(" 0") for line in lines)


def test_wrong_requests_are_answered(address: str):
    for path in ("api/curves?run=7", "api/curves", "api/details?run=-1", "nothing"):
        assert refused(address, path) == 404
    assert json.loads(get(address, "api/curves?run=0&points=999999999&first=x")[1])["curves"]


def test_a_page_of_another_site_reads_nothing(address: str):
    assert refused(address, "api/runs", Host="evil.example") == 403
    assert json.loads(get(address, "api/runs", Host="localhost:9999")[1])["runs"]  # an ssh tunnel


def test_the_stream_says_what_is_new(tmp_path: Path):
    run_dir = write_run(tmp_path / "live", num_steps=5)
    with (
        watching(str(tmp_path)) as address,
        urllib.request.urlopen(address + "api/stream", timeout=120) as stream,
    ):
        steps: list[int] = []
        while not steps or steps[-1] < 8:
            line = stream.readline().decode()
            if line.startswith("data: "):
                steps.append(json.loads(line[6:])["runs"][0]["step"] or 0)
                if steps[-1] == 5:
                    write_steps(run_dir, 6, 8)
    assert steps == sorted(steps)


def test_elsewhere_a_token_is_needed(run_dir: Path):
    with watching(str(run_dir), "--host", "0.0.0.0") as address:
        token = address.split("token=")[1]
        here = f"http://127.0.0.1:{address.split(':')[2].split('/')[0]}/"
        assert len(token) >= 32
        assert json.loads(get(here, f"api/runs?token={token}")[1])["runs"]
        for path in ("", "metrics", "api/runs?token=wrong"):
            assert refused(here, path) == 403


def test_a_directory_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run_cli(["watch", str(tmp_path)]) == 2
    assert "not a run directory" in capsys.readouterr().err


def test_absent_packages_are_named(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(watch_verb, "PACKAGES", ("starlette", "no_such_package"))
    assert run_cli(["watch", str(run_dir)]) == 2
    message = capsys.readouterr().err
    assert "watch needs no_such_package" in message and 'pip install "meshwright[watch]"' in message
