"""The changes most worth trying: which, with what gain, and never more than the trace has to gain."""

from typing import Any

import pytest
from tests.support.run_files import DENSE
from tests.support.traces import h200_document

from meshwright.hardware import parse_cluster
from meshwright.hardware.machine import Machine
from meshwright.observe.profile.changes import Change, Situation, best_changes, padded_settings
from meshwright.observe.profile.rank_profile import RankProfile, Recorded, rank_profile
from meshwright.observe.profile.trace import read_trace
from meshwright.spec import RunSpec
from meshwright.spec.text import parse_run

H200 = parse_cluster("h200:1")


def run_of(*overrides: str) -> RunSpec:
    shape = ["model.width=2048", "model.mlp.width=8192", "model.vocab_size=32003", "device=cuda"]
    shape += ["data.sequence_length=2048", "model.max_positions=2048", "precision.compute=bf16"]
    shape += ["data.batch_sequences=4", "data.microbatch_sequences=4", "compile=true"]
    return parse_run(DENSE, [*shape, *overrides]).require_valid()


def profile_of(width: int = 2048, step_seconds: float = 0.006) -> RankProfile:
    recorded = Recorded(step_seconds=step_seconds, data_seconds=1e-4)
    return rank_profile(read_trace(h200_document(width=width)), recorded)


def by_override(changes: list[Change]) -> dict[str, Change]:
    return {change.overrides: change for change in changes}


def test_a_misaligned_width_is_padded_first() -> None:
    found = best_changes(Situation(run_of("model.width=2049"), profile_of(2049, 0.0152), H200))
    first = found[0]
    assert first.overrides == "model.width=2112" and first.basis == "measured"
    assert "8192 x 2049 x 32064 in bf16" in first.why and "4098 bytes" in first.why
    # The head would take 1.5 of 10.7 ms: 61% of the step.
    assert first.low <= 0.61 <= first.high * 1.05
    assert len(found) <= 3


def test_an_aligned_run_is_not_padded() -> None:
    """The head pads the vocabulary itself: its matmul has 32064 columns."""
    found = best_changes(Situation(run_of(), profile_of(), H200))
    assert not any(key.startswith("model.") for change in found for key, _ in change.settings)


def test_gaps_are_closed_by_cuda_graphs() -> None:
    found = by_override(best_changes(Situation(run_of("compile=false"), profile_of(), H200)))
    graphs = found["cuda_graphs=true"]
    assert graphs.gain == pytest.approx(0.9 * 0.3) and graphs.high == pytest.approx(0.3)


def test_a_predicted_gain_is_at_most_what_the_trace_has() -> None:
    """fp8 cannot gain more than the matmuls take."""
    situation = Situation(run_of(), profile_of(step_seconds=0.06), H200)
    found = by_override(best_changes(situation))
    assert all(change.gain <= 0.9 for change in found.values())
    fp8 = found.get("precision.fp8=current")
    assert fp8 is None or (fp8.high <= 0.045 + 1e-9 and fp8.changes_numerics)


def test_fp32_is_replaced_by_a_format_of_tensor_cores() -> None:
    situation = Situation(run_of("precision.compute=fp32"), profile_of(), H200)
    found = by_override(best_changes(situation))
    assert found["precision.compute=bf16"].changes_numerics
    assert "precision.compute=tf32" not in found  # one change for one setting, the larger


def test_on_a_cpu_only_bounds_are_known() -> None:
    machine = Machine(cores=2, free_memory_bytes=8 * 2**30)
    run = run_of("device=cpu", "precision.compute=fp32", "compile=false", "data.microbatch_sequences=1")
    found = best_changes(Situation(run, profile_of(), None, machine))
    assert found and all(change.basis in ("bound", "measured") for change in found)
    assert {change.overrides.partition("=")[0] for change in found} >= {"compile"}


def test_dims_of_a_rank_lead_to_their_settings() -> None:
    run = run_of("model.width=2049", "model.mlp.width=5462")
    found = padded_settings(run)
    assert found[2049] == ("model.width", 2112) and found[5462] == ("model.mlp.width", 5504)
    assert found[2 * 5462] == ("model.mlp.width", 5504)  # gate and up fused
    assert found[32003] == ("model.vocab_size", 32064)


def test_a_change_is_written_as_on_the_command_line() -> None:
    settings: tuple[tuple[str, Any], ...] = (("compile", True), ("model.width", 64))
    assert Change(settings, 0.1, 0.0, 0.2, "bound", "").overrides == "compile=true model.width=64"
