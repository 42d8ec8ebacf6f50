"""A measured profile replaces the data sheet's figures."""

import json
from pathlib import Path

import pytest

from meshwright.errors import SpecError
from meshwright.hardware import parse_cluster, read_profile

MEASURED = {
    "device": "h200",
    "gemm": [
        {"m": 4096, "n": 4096, "k": 4096, "precision": "bf16", "seconds": 2.0e-4},
        {"m": 64, "n": 64, "k": 64, "precision": "bf16", "seconds": 1.0e-5},
    ],
    "attention": [
        {"batch": 1, "sequence": 4096, "heads": 32, "head_width": 128, "precision": "bf16", "seconds": 3.0e-4}
    ],
    "copy_bytes_per_second": 4.0e12,
    "host_bytes_per_second": 5.0e10,
    "collectives": [
        {"kind": "all_reduce", "ranks": 8, "bytes": 1024, "seconds": 28e-6},
        {"kind": "all_reduce", "ranks": 8, "bytes": 2**30, "seconds": 5e-3},
    ],
}


def _write(path: Path, document: object) -> Path:
    path.write_text(json.dumps(document))
    return path


def test_measured_figures_replace_the_data_sheet(tmp_path: Path) -> None:
    plain = parse_cluster("h200:8")
    cluster = read_profile(_write(tmp_path / "p.json", MEASURED)).applied_to(plain)
    # The best measured shape is the ceiling of the device.
    best = 2 * 4096**3 / 2.0e-4
    assert cluster.device.best_matmul_flops_per_second["bf16"] == pytest.approx(best)
    assert cluster.device.copy_bytes_per_second == 4.0e12
    assert cluster.host.bytes_per_second == 5.0e10
    # 14 hops of 2 us; the rest of the large message is bandwidth.
    assert cluster.peer.latency_seconds == pytest.approx(2e-6)
    assert cluster.peer.bytes_per_second == pytest.approx(2 * 7 / 8 * 2**30 / (5e-3 - 28e-6))
    assert cluster.peer.efficiency == 1.0
    assert cluster.network == plain.network


def test_a_card_that_slows_down_under_load_is_reckoned_slower(tmp_path: Path) -> None:
    """Matmuls and attention run at the sustained share of the best rate."""
    best = 2 * 4096**3 / 2.0e-4
    lasting = {**MEASURED, "sustained_flops_per_second": {"bf16": 0.8 * best}}
    plain = parse_cluster("h200:8")
    short = read_profile(_write(tmp_path / "short.json", MEASURED)).applied_to(plain).device
    found = read_profile(_write(tmp_path / "long.json", lasting)).applied_to(plain).device
    assert found.matmul_ceiling("bf16") == pytest.approx(0.8 * best)
    assert found.sustained_share["fp16"] == pytest.approx(0.8)
    assert found.matmul_ceiling("fp8") == plain.device.matmul_ceiling("fp8")
    assert short.best_attention_flops_per_second is not None
    assert found.best_attention_flops_per_second == pytest.approx(0.8 * short.best_attention_flops_per_second)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"sustained_flops_per_second": {"bf16": "fast"}}, "sustained_flops_per_second"),
        ({"gemm": [{"m": 0, "n": 1, "k": 1, "seconds": 1}]}, "gemm[0]"),
        ({"gemm": "fast"}, "not a list"),
        ({"collectives": [{"kind": "hug", "ranks": 2, "bytes": 1, "seconds": 1}]}, "hug"),
        ({"copy_bytes_per_second": -1}, "copy_bytes_per_second"),
    ],
)
def test_a_wrong_profile_names_the_entry(tmp_path: Path, change: dict[str, object], expected: str) -> None:
    with pytest.raises(SpecError) as caught:
        read_profile(_write(tmp_path / "p.json", {**MEASURED, **change}))
    assert expected in str(caught.value)


def test_a_file_that_is_no_profile_is_refused(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text("[1, 2]")
    with pytest.raises(SpecError, match="not a JSON object"):
        read_profile(tmp_path / "p.json")
    with pytest.raises(SpecError, match="cannot read"):
        read_profile(tmp_path / "none.json")


def test_a_profile_of_another_device_is_refused(tmp_path: Path) -> None:
    profile = read_profile(_write(tmp_path / "p.json", MEASURED))
    with pytest.raises(SpecError, match="measured on h200"):
        profile.applied_to(parse_cluster("h100:8"))
