"""Histograms: shares of fp8 ranges, the file, and counts of a tensor whose magnitudes are known."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.watched_runs import write_histograms, write_run

from meshwright.cli.main import run as run_cli
from meshwright.observe.histograms import (
    E4M3,
    E5M2,
    LOWEST_EXPONENT,
    NUM_BINS,
    Histogram,
    HistogramIndex,
    HistogramWriter,
    Place,
    read_histograms,
    total,
)
from meshwright.observe.tensorboard import TensorBoardMirror
from meshwright.observe.watch.histogram_view import histogram_view
from meshwright.ops.magnitudes import count_magnitudes

PLACE = Place("activation", 3, "mlp.down")


def counted(values: torch.Tensor, **options: float) -> Histogram:
    counts, amax = count_magnitudes(values, lowest=LOWEST_EXPONENT, num_bins=NUM_BINS, **options)
    return Histogram.of_row(counts.numpy(), float(amax))


VALUES = torch.tensor(
    [
        0.0,
        -0.0,
        1.0,
        -1.5,
        2.0,
        448.0,
        449.0,
        -60000.0,
        2.0**-11,
        2.0**-10,
        2.0**-18,
        float("inf"),
        float("nan"),
    ]
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_counts_by_power_of_two(dtype: torch.dtype):
    found = counted(VALUES.to(dtype).reshape(1, -1))
    by_exponent = {int(bin) + LOWEST_EXPONENT: int(found.counts[bin]) for bin in np.flatnonzero(found.counts)}
    assert by_exponent == {-18: 1, -11: 1, -10: 1, 0: 2, 1: 1, 8: 2, 15: 1}
    assert (found.zeros, found.not_finite, found.above_e4m3, found.above_e5m2) == (2, 2, 2, 1)
    assert found.amax == 60000.0 and found.num_elements == 13
    assert found.underflow_share(E4M3) == 2 / 13 and found.underflow_share(E5M2) == 1 / 13
    assert found.overflow_share(E4M3) == 2 / 13 and found.overflow_share(E5M2) == 1 / 13


def test_magnitudes_beyond_the_bins_are_counted_at_their_ends():
    found = counted(torch.tensor([1e-30, 1e-44, 1e30]))
    assert found.counts[0] == 2 and found.counts[-1] == 1


def test_gradients_are_divided_by_the_loss_scale():
    assert counted(torch.tensor([4.0]), factor=0.25).counts[-LOWEST_EXPONENT] == 1


def test_a_scale_maps_the_largest_to_the_end_of_the_format():
    """Magnitudes 2^-20 and 2^-40: e4m3 has both without a scale at zero, and with one loses the smaller."""
    found = counted(torch.tensor([2.0**-20] * 3 + [2.0**-40]))
    assert found.underflow_share(E4M3) == 1.0
    assert found.scaled_underflow_share(E4M3) == 0.25
    assert counted(torch.zeros(3)).scaled_underflow_share(E4M3) == 0.0


def test_the_bin_of_the_limit_counts_in_part():
    counts = np.zeros(NUM_BINS, np.int64)
    counts[-10 - LOWEST_EXPONENT] = 100
    found = Histogram(counts, 0, 0, 0, 0, amax=448.0 * 2**0.25)
    assert found.scaled_underflow_share(E4M3) == pytest.approx(0.25)


def test_the_file_is_read_back_and_damage_is_skipped(tmp_path: Path):
    first, second = counted(VALUES), counted(torch.zeros(4))
    with HistogramWriter(tmp_path) as writer:
        writer.write(2, {PLACE: first})
        writer.write(4, {PLACE: second, Place("weight_gradient", None, "head"): first})
    with (tmp_path / "histograms.jsonl").open("a") as file:
        file.write('{"step": 6, "histograms": [{"kind": "activation"}]}\n{"step": 8\n')
        file.write('{"step": 9, "histograms": 3}\n[]\n')
    found = read_histograms(tmp_path)
    assert [one.step for one in found] == [2, 4]
    assert (found[0].histograms[PLACE].counts == first.counts).all()
    assert found[1].histograms[PLACE].zeros == 4 and len(found[1].histograms) == 2
    with HistogramWriter(tmp_path, restored_step=3) as writer:
        writer.write(4, {PLACE: first})
    assert [one.step for one in read_histograms(tmp_path)] == [2, 4]
    assert total([first, second]).zeros == 6


def test_a_file_without_a_line_is_removed(tmp_path: Path):
    HistogramWriter(tmp_path).close()
    assert read_histograms(tmp_path) == [] and not list(tmp_path.iterdir())


def test_tensorboard_gets_the_exponents(tmp_path: Path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with TensorBoardMirror(tmp_path) as mirror:
        mirror.write_histograms(
            5, {PLACE: counted(VALUES), Place("activation", 0, "x"): counted(torch.zeros(2))}
        )
    read = reader.EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    (tag,) = read.Tags()["histograms"]
    (event,) = read.Histograms(tag)
    assert tag == "activation/mlp.down/003" and event.step == 5
    assert event.histogram_value.num == 9 and event.histogram_value.min == -18


def test_show_prints_layers_and_writes_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_histograms(write_run(tmp_path / "base", num_steps=2), num_layers=3)
    words = ["show", "histograms", str(tmp_path / "base")]
    assert (
        run_cli([*words, "--kind", "activation", "--matmul", "mlp.down", "--svg", str(tmp_path / "a.svg")])
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("mlp.down, inputs of the matmul, step 60")
    assert lines[1].split()[:4] == ["layer", "largest", "zero", "<"] and len(lines) == 6
    assert "prefers-color-scheme: dark" in (tmp_path / "a.svg").read_text()
    assert run_cli([*words, "--step", "20", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found) == 12 and found[0]["step"] == 20 and len(found[0]["layers"]) == 3
    assert run_cli([*words, "--kind", "gradient"]) == 2
    assert "did you mean 'weight_gradient'?" in capsys.readouterr().err


def test_show_says_how_a_run_gets_histograms(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run_cli(["show", "histograms", str(write_run(tmp_path / "base", num_steps=2))]) != 0
    assert "observe.histograms.every_steps" in capsys.readouterr().err


def test_the_page_gets_what_it_asks_for(tmp_path: Path):
    write_histograms(tmp_path, num_layers=3)
    index = HistogramIndex(tmp_path)
    found = histogram_view(index, kind="weight_gradient", name="nothing", step=7, layer=2)
    assert found is not None
    assert (found["kind"], found["name"], found["step"], found["layer"]) == (
        *("weight_gradient", "attention.qkv", 60, 2),
    )
    assert found["steps"] == found["all_steps"] == [20, 40, 60] and len(found["layers"]) == 3
    bins = len(found["layer_shares"][0])
    assert {len(row) for row in [*found["layer_shares"], *found["step_shares"]]} == {bins}
    assert histogram_view(HistogramIndex(tmp_path / "nothing")) is None
