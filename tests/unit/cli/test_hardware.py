"""`hardware list` and `hardware compare` as a person and as a program use them."""

import json
from pathlib import Path

import pytest

from meshwright.cli.main import run
from meshwright.hardware import cluster_names, device_names


def _run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = run(arguments)
    out, err = capsys.readouterr()
    return code, out, err


def test_every_device_and_cluster_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = _run(["hardware", "list"], capsys)
    names = [line.split()[0] for line in out.splitlines() if line]
    assert code == 0
    assert names == ["device", *device_names(), "cluster", *cluster_names()]
    assert max(map(len, out.splitlines())) < 120


def test_sources_stand_beside_the_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = _run(["hardware", "list", "--sources"], capsys)
    assert code == 0
    assert "NVLink 4, 900 GB/s both directions together" in out


def test_json_holds_every_number_and_source(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = _run(["hardware", "list", "--json"], capsys)
    found = json.loads(out)
    assert code == 0
    assert found["devices"]["h100"]["peak_flops_per_second"]["bf16"] == 9.894e14
    assert found["clusters"]["leonardo"]["device"] == "a100-64gb"
    assert found["devices"]["h100"]["sources"]["num_sms"] == "Hopper white paper"


def test_a_profile_is_shown_beside_the_catalogue(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = tmp_path / "p.json"
    profile.write_text(json.dumps({"device": "h200", "copy_bytes_per_second": 4.0e12}))
    code, out, _ = _run(["hardware", "compare", str(profile), "--json"], capsys)
    found = json.loads(out)
    assert code == 0
    assert found["memory, TB/s"]["measured"] == 4.0
    assert found["memory, TB/s"]["catalogue"] == pytest.approx(0.8 * 4.8)
    code, out, _ = _run(["hardware", "compare", str(profile)], capsys)
    assert code == 0 and "peer link, GB/s" in out


def test_a_missing_profile_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = _run(["hardware", "compare", "none.json"], capsys)
    assert (code, out) == (2, "") and "none.json" in err
