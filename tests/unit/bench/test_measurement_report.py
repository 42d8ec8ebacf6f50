"""Rows as tables, pages and charts."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from meshwright.bench.measurement_report import KIND_OF, charts, heading, line, log_rows, write_folder
from meshwright.bench.picture import bars, chart, show_size
from meshwright.errors import SpecError
from meshwright.hardware import find_device

SHAPE = {"m": 4096, "k": 4096, "precision": "bf16", "seconds": 1e-3, "spread": 0.01}
SWEEP = [{**SHAPE, "n": n, "teraflops": n / 10.0} for n in range(2048, 4097, 64)]


def test_every_kind_has_a_heading_as_wide_as_its_rows() -> None:
    assert len(line("shapes", SWEEP[0])) == len(heading("shapes"))
    assert set(KIND_OF.values()) <= {
        "matmuls",
        "shapes",
        "attention",
        "copies",
        "collectives",
        "axes",
        "scaling",
        "data",
        "checkpoint",
    }


def test_rows_are_logged_as_they_come() -> None:
    lines: list[str] = []
    rows = log_rows("shapes", iter(SWEEP[:2]), lines.append)
    assert rows == SWEEP[:2] and len(lines) == 3 and "204.8" in lines[1]


def test_an_error_stands_at_the_end_of_its_row() -> None:
    assert line("attention", {"backend": "cudnn", "error": "not available for this case"}).endswith(
        "for this case"
    )


def test_a_chart_is_svg_with_a_line_for_each_series() -> None:
    drawn = ElementTree.fromstring(
        chart("a < b", {"one": [(1, 2), (2, 3)], "two": [(1, 1)]}, x_name="x", y_name="y")
    )
    assert sum(part.tag.endswith("polyline") for part in drawn.iter()) == 2
    assert any(part.text == "a < b" for part in drawn.iter())


def test_the_sweep_is_drawn_beside_the_planner_s_tiles() -> None:
    drawn = charts("gemm", {"widths": SWEEP}, find_device("h200"))["gemm_widths"]
    assert "model: tiles and waves" in drawn and "measured" in drawn


def test_bars_are_in_proportion() -> None:
    assert bars([("a", 1.0), ("b", 2.0)], width=10).splitlines()[0].count("#") == 5
    assert show_size(1 << 20) == "1Mi" and show_size(4096) == "4096" and show_size(1 << 16) == "64Ki"


def test_a_folder_holds_page_numbers_and_pictures(tmp_path: Path) -> None:
    document = {
        "device": "NVIDIA H200",
        "date": "2026-11-15",
        "torch": "2.11",
        "sections": {"widths": SWEEP},
    }
    written = write_folder(tmp_path / "results", "gemm", document, find_device("h200"))
    assert sorted(path.name for path in written) == ["gemm.json", "gemm.md", "gemm_widths.svg"]
    assert json.loads((tmp_path / "results/gemm.json").read_text()) == document
    page = (tmp_path / "results/gemm.md").read_text()
    assert "| 4096 | 2048 | 4096 | bf16 |" in page and "(gemm_widths.svg)" in page


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SpecError, match="cannot be written"):
        write_folder(tmp_path / "file", "gemm", {"device": "x", "sections": {}}, None)
