"""The profile that a probe writes is one that the planner reads and reckons with."""

import json
from pathlib import Path

import pytest
import torch

from meshwright.bench import copy, gemm, probe
from meshwright.cli.main import run
from meshwright.errors import SpecError
from meshwright.hardware import cluster_of, read_profile
from meshwright.hardware.profile import profile_from

CPU = torch.device("cpu")


@pytest.fixture
def document(monkeypatch: pytest.MonkeyPatch) -> dict:
    monkeypatch.setitem(copy.MEMORY_BYTES, "cpu", 1 << 16)
    monkeypatch.setitem(gemm.TOKENS, "cpu", 8)
    lines: list[str] = []
    found = probe.probe(CPU, seconds=1e-4, log=lines.append)
    assert lines == ["matmuls", "attention", "copies"]
    return found


def test_a_probe_is_a_profile_with_provenance(document: dict) -> None:
    found = profile_from(document, where="here")
    assert found.device == "cpu" and found.num_devices == 1 and found.memory_bytes
    assert found.measured["torch"] == torch.__version__ and found.measured["date"]
    best = max(t.flops_per_second for t in found.gemm if t.precision == "fp32")
    assert found.machine().device.best_matmul_flops_per_second["fp32"] == best
    assert found.machine().device.title.startswith(found.measured["device"])


def step_seconds(on: str, capsys: pytest.CaptureFixture[str]) -> float:
    words = ["predict", "tiny", "--on", on, "--json"]
    assert run(words) == 0
    return json.loads(capsys.readouterr().out)["step_seconds"]


PROFILE = {
    "device": "h200",
    "machine": {"num_devices": 2, "num_sms": 132, "memory_bytes": 150109106995},
    "gemm": [{"m": 8192, "n": 8192, "k": 8192, "precision": "bf16", "seconds": 1.4e-3}],
}


def test_a_slower_measured_machine_is_predicted_slower(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole way: a profile on disk, the command line, the price of a step."""
    seconds = []
    for factor in (1.0, 4.0):
        path = tmp_path / f"machine-{factor}.json"
        product = {**PROFILE["gemm"][0], "seconds": 1.4e-3 * factor}
        path.write_text(json.dumps({**PROFILE, "gemm": [product]}))
        words = ["predict", "llama-3.1-8b-8gpu", "--on", f"{path}:8", "--json"]
        assert run(words) in (0, 3)
        seconds.append(json.loads(capsys.readouterr().out)["step_seconds"])
    assert seconds[1] > 2 * seconds[0]


def test_plan_uses_the_profile_of_the_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(PROFILE))
    assert run(["plan", "gpt2-124m", "--on", str(path), "--seq", "1024", "--batch-tokens", "64K"]) == 0
    assert "2 x NVIDIA H200 SXM 141GB, measured" in capsys.readouterr().out


def test_a_device_that_no_catalogue_knows_is_made_of_measurements(tmp_path: Path) -> None:
    unknown = {**PROFILE, "device": "Abacus 9", "copy_bytes_per_second": 1e12}
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(unknown))
    cluster = cluster_of(f"{path}:4")
    assert cluster.num_devices == 4
    assert cluster.device.peak("bf16") == pytest.approx(2 * 8192**3 / 1.4e-3)
    path.write_text(json.dumps({"device": "Abacus 9"}))
    with pytest.raises(SpecError, match="no 'Abacus 9'"):
        cluster_of(str(path))


def test_attention_is_rated_over_both_passes() -> None:
    shape = {"batch": 1, "sequence": 4096, "heads": 32, "head_width": 128, "precision": "bf16"}
    entries = [{**shape, "seconds": 3e-4}, {**shape, "seconds": 9e-4, "backward": True}]
    found = profile_from({"device": "h200", "attention": entries}, where="here").machine()
    forward = 2 * 32 * 4096**2 * 128
    assert found.device.best_attention_flops_per_second == pytest.approx(3.5 * forward / 12e-4)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("none.json", "cannot read"),
        ("none.json:x", "not a number of devices"),
        ("none.json:0", "not a number"),
    ],
)
def test_a_profile_that_cannot_be_read_is_refused(text: str, says: str) -> None:
    with pytest.raises(SpecError, match=says) as caught:
        cluster_of(text)
    assert caught.value.where == "--on"


def test_a_profile_with_a_wrong_machine_names_it(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps({"device": "h200", "machine": {"num_sms": -1}}))
    with pytest.raises(SpecError, match="num_sms"):
        read_profile(path)
    path.write_text(json.dumps({"device": "h200", "machine": 5}))
    with pytest.raises(SpecError, match="not an object"):
        read_profile(path)
