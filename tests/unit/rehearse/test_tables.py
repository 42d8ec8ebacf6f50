"""The figures of a rehearsal as a terminal shows them."""

import io

import pytest
from rich.console import Console, RenderableType

from meshwright.hardware.catalogue import parse_cluster
from meshwright.rehearse.measure import Measured
from meshwright.rehearse.rank_report import RankReport
from meshwright.rehearse.tables import draw_measured, draw_memory

GIB = 2**30


def report(rank: int) -> RankReport:
    return RankReport(
        rank=rank,
        coordinates={},
        items={"weights": 1.0 * GIB, "activations": 2.0 * GIB, "workspace": 1.0 * GIB},
        peak_phase="forward of head, micro-batch 0",
        reserved_bytes=4.0 * GIB,
        reserved_default_bytes=5.0 * GIB,
        collectives=[],
        flops=1e12,
        num_traces=1,
        seconds=1.0,
    )


def text(drawn: RenderableType, width: int = 80) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width).print(drawn)
    return stream.getvalue()


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_bars_fit_beside_the_ranks_and_stay_in_proportion(num_ranks: int) -> None:
    shown = text(draw_memory([report(rank) for rank in range(num_ranks)], None, width=80))
    assert "…" not in shown
    bars = [line.count("█") for line in shown.splitlines()[1:4]]
    assert bars[1] == 2 * bars[0] > 2


def test_the_heading_names_what_the_bars_are_a_share_of() -> None:
    assert "of 4.0 GiB reserved" in text(draw_memory([report(0)], None))
    heading = text(draw_memory([report(0)], parse_cluster("h100:1"))).splitlines()[0]
    assert heading.rstrip().endswith("of 79.2 GiB")


def test_a_cpu_counts_no_bytes() -> None:
    measured = Measured(0, "cpu", 0, 0, step_seconds=0.5, microbatch_seconds=0.25, is_expandable=False)
    shown = text(draw_measured([report(0)], [measured]))
    assert shown.count("not counted on a CPU") == 2 and "500 ms" in shown
