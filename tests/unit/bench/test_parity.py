"""The verdict of `bench.parity`, and the text its runs learn."""

from pathlib import Path

import numpy as np
import pytest
from bench.parity import DEFAULT_KINDS, parse, seeds_of
from bench.reports.parity import Curve, judge, spread, verdict_lines, write_results
from bench.workloads.library_text import library_documents, library_files, write_library

from meshwright.data.sources import TokenFile
from meshwright.errors import SpecError

FACTS = {
    "device": "NVIDIA H200", "torch": "2.11", "date": "2026-11-15", "python": "3.12", "num_files": 3,
    "num_bytes": 1000, "frequencies": 3.4,
    "run": {"model": {"family": "gpt2-124m"}, "data": {"batch_sequences": 6, "sequence_length": 1024}},
}  # fmt: skip


def curve(kind: str, seed: int, loss: float, held_out: float | None = None) -> Curve:
    return Curve(kind, seed, [5.0] * 8 + [loss] * 2, loss if held_out is None else held_out, 1.0)


BASE = [curve("bf16", seed, 2.0 + 0.01 * seed) for seed in range(3)]


def test_a_gap_is_to_bf16_of_the_same_seed() -> None:
    # 2.02 of seed 0 is 0.02 above its own bf16 and no more than the worst seed of bf16.
    (_, verdict) = judge([*BASE, curve("current", 0, 2.02), curve("current", 1, 2.02)])
    assert verdict.last_gap.mean == pytest.approx(0.015) and verdict.last_gap.high == pytest.approx(0.02)
    assert spread(BASE) == pytest.approx((0.02, 0.02)) and verdict.is_inside


@pytest.mark.parametrize(("loss", "held_out"), [(2.03, 2.0), (2.0, 2.03), (1.97, 2.0), (float("nan"), 2.0)])
def test_training_loss_and_held_out_loss_have_to_be_inside(loss: float, held_out: float) -> None:
    (_, verdict) = judge([*BASE, curve("current", 0, loss, held_out)])
    assert not verdict.is_inside


def test_a_control_inside_the_spread_is_no_proof(tmp_path: Path) -> None:
    good, bad = curve("current", 1, 2.015), curve("control", 1, 2.5)
    assert write_results([bad, *BASE, good], FACTS, tmp_path, name="parity")
    weak = [*BASE, good, curve("control", 1, 2.0)]
    assert not write_results(weak, FACTS, tmp_path, name="parity")
    assert "WRONG: expected outside" in verdict_lines(weak)[-1]
    page = (tmp_path / "parity_h200_2026-11-15.md").read_text()
    assert "Runs: bf16 3, current 1, control 1." in page and "| inside |" in page
    assert not write_results([good], FACTS, tmp_path, name="parity")  # nothing to compare with yet


def test_bf16_has_more_seeds_than_the_others() -> None:
    options = parse([])
    assert {kind: len(seeds_of(kind, options)) for kind in DEFAULT_KINDS} == {
        "bf16": 5, "fp32": 3, "current": 3, "control": 3,
    }  # fmt: skip
    assert options.steps >= 500


def test_the_text_is_the_same_everywhere_and_not_in_the_order_of_names(tmp_path: Path) -> None:
    for name in "abcdef":
        (tmp_path / f"{name}.py").write_text(name * 10)
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "x.py").write_text("x")
    names = [path.stem for path in library_files(tmp_path)]
    assert sorted(names) == list("abcdef") != names
    first, second, *_ = library_documents(20, tmp_path)
    assert (bytes(first.astype(np.uint8) - 1), len(second)) == (names[0].encode() * 10, 10)
    with pytest.raises(SpecError, match="66 bytes, 1000 are needed"):
        library_documents(1000, tmp_path)


def test_the_dataset_holds_bytes_above_the_end_of_document(tmp_path: Path) -> None:
    facts = write_library(tmp_path / "text", vocab_size=384, num_tokens=20_000)
    tokens = TokenFile.open(tmp_path / "text").tokens
    assert len(tokens) >= 20_000 and int(tokens.max()) <= 256 and (tokens == 0).sum() == facts["num_files"]
    assert 2.0 < facts["frequencies"] < np.log(256)
