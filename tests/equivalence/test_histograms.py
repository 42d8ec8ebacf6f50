"""Histograms of activations and gradients: counted as on one device, whatever the mesh."""

import numpy as np
import pytest
from tests.support.equivalence import worst_errors
from tests.support.layouts import Layout
from tests.support.run_directories import assert_same_state, attempt, last_checkpoint, read_tensors
from tests.support.runs import MODELS, tiny_run

from meshwright.mesh import build_mesh
from meshwright.observe.histograms import (
    LOWEST_EXPONENT,
    NUM_BINS,
    Histogram,
    Histograms,
    Place,
    read_histograms,
)
from meshwright.observe.metrics import read_metrics
from meshwright.rehearse.rank_pool import RankPool, this_world
from meshwright.spec import (
    AdapterSpec,
    CheckpointSpec,
    HistogramsSpec,
    MemorySpec,
    ObserveSpec,
    ParallelSpec,
    PrecisionSpec,
    RunSpec,
)
from meshwright.train.build import build_data, build_training, seed_step
from meshwright.train.histogram_probe import HistogramProbe

EVERY_STEP = ObserveSpec(histograms=HistogramsSpec(every_steps=1))
FULL = MemorySpec(recompute="full")
REGATHER = MemorySpec(regather_tp_inputs=True)


def measure_here(run: RunSpec) -> Histograms:
    """One rank's part: the histograms of the first batch at the initial weights."""
    mesh = build_mesh(run.parallel, this_world())
    training, batches = build_training(run, mesh), build_data(run, mesh)
    seed_step(run.seed, 0)
    found = HistogramProbe(run, training, mesh).measure(next(batches))
    batches.close()
    return found


def measured(ranks: RankPool, run: RunSpec) -> Histograms:
    """The histograms, which are the same on all ranks."""
    first, *others = ranks.run(measure_here, run.parallel.num_ranks, run.with_(observe=EVERY_STEP))
    for other in others:
        assert list(other) == list(first)
    return first


def above_rounding(one: Histogram) -> np.ndarray:
    """Counts of exponents, with all that may be a rounded zero as one: 2^-40 of the largest and below."""
    first = max(0, int(np.log2(one.amax)) - 40 - LOWEST_EXPONENT) if one.amax else NUM_BINS
    return np.append(one.counts[first:], one.counts[:first].sum() + one.zeros)


def case(model: str, memory: MemorySpec | None = None, **parallel: object) -> RunSpec:
    run = Layout(ParallelSpec.model_validate(parallel), model).run()
    return run.with_(memory=memory or MemorySpec())


CASES = {
    "tp2-gqa": case("gqa", tp=2),
    "tp2-mla-regather": case("mla", REGATHER, tp=2),
    "zero3-tied-recompute": case("tied", FULL, dp_shard=2, zero=3),
    "pp2-zbv-gpt": case("gpt", pp=2, schedule="zbv", virtual_stages=2),
    "cp2-gqa-adapter": case("gqa", cp=2).with_(adapter=AdapterSpec(rank=3, alpha=8)),
    "ep2-moe_shared-recompute": case("moe_shared", FULL, dp_shard=2, zero=1, ep=2),
    "tp2-etp2-moe_shared": case("moe_shared", tp=2, etp=2),
}


@pytest.mark.parametrize("name", CASES)
def test_counts_are_those_of_one_device(ranks: RankPool, name: str) -> None:
    run = CASES[name]
    alone = run.with_(parallel=ParallelSpec(), memory=MemorySpec())
    ours, expected = measured(ranks, run), measured(ranks, alone)
    assert set(ours) == set(expected)
    for place, wanted in expected.items():
        found = ours[place]
        assert found.num_elements == wanted.num_elements, place
        # Another order of sums carries a value over a power of two now and then.
        moved = np.abs(above_rounding(found) - above_rounding(wanted)).sum()
        assert moved <= max(2, 0.001 * wanted.num_elements), place
        assert found.amax == pytest.approx(wanted.amax, rel=1e-9)


def test_every_matmul_has_its_rows(ranks: RankPool) -> None:
    """Elements of the batch's 8 x 16 tokens: width 16, 8 heads of 4, 4 key/value heads, MLP width 24."""
    found = measured(ranks, tiny_run("gqa", microbatch_sequences=4))
    tokens, layer = 8 * 16, 1
    sizes = {
        Place("activation", layer, "attention.qkv"): tokens * 16,
        Place("activation", layer, "attention.output"): tokens * 32,
        Place("activation", layer, "mlp.gate_up"): tokens * 16,
        Place("activation", layer, "mlp.down"): tokens * 24,
        Place("activation", None, "head"): tokens * 16,
        Place("output_gradient", layer, "attention.qkv"): tokens * (32 + 16 + 16),
        Place("output_gradient", layer, "mlp.down"): tokens * 16,
        Place("weight_gradient", layer, "attention.qkv"): 16 * (32 + 16 + 16),
        Place("weight_gradient", layer, "mlp.gate_up"): 2 * 16 * 24,
        Place("weight_gradient", None, "head"): 70 * 16,
    }
    assert {place: found[place].num_elements for place in sizes} == sizes
    assert {place.layer for place in found} == {0, 1, None}


def test_a_run_writes_them_and_trains_as_without(ranks: RankPool, tmp_path) -> None:
    """Bit for bit, with dropout and the balance biases of routers; a resume goes on with one history."""
    plain = tiny_run(
        MODELS["moe_shared"].with_(dropout=0.2),
        parallel=ParallelSpec(dp_shard=2, zero=1, ep=2),
        optim="adamw",
        precision=PrecisionSpec(),
        deterministic=True,
        checkpoint=CheckpointSpec(every_steps=2),
    )
    counted = plain.with_(observe=ObserveSpec(histograms=HistogramsSpec(every_steps=2)))
    attempt(ranks, plain, tmp_path / "plain")
    attempt(ranks, counted, tmp_path / "whole")
    attempt(ranks, counted, tmp_path / "parts", stop_after=3)
    attempt(ranks, counted, tmp_path / "parts")
    assert_same_state(tmp_path / "parts", tmp_path / "whole")
    ours, theirs = (read_tensors(last_checkpoint(tmp_path / name)) for name in ("whole", "plain"))
    assert not max(worst_errors(ours, theirs).values())
    for key in ("loss", "grad_norm", "expert_load_max", "aux_loss"):
        histories = [[row[key] for row in read_metrics(tmp_path / name)] for name in ("plain", "whole")]
        assert histories[0] == histories[1]
    whole, parts = (read_histograms(tmp_path / name) for name in ("whole", "parts"))
    assert [one.step for one in whole] == [one.step for one in parts] == [2, 4, 6]
    assert all(
        (one.counts == parts[-1].histograms[place].counts).all()
        for place, one in whole[-1].histograms.items()
    )
    assert not (tmp_path / "plain" / "histograms.jsonl").exists()


@pytest.mark.soak
def test_compiled_blocks_are_counted_uncompiled(ranks: RankPool) -> None:
    run = tiny_run("gqa", microbatch_sequences=4, precision=PrecisionSpec())
    ours, expected = measured(ranks, run.with_(compile=True)), measured(ranks, run)
    assert set(ours) == set(expected)
    for place, wanted in expected.items():
        assert ours[place].num_elements == wanted.num_elements
        assert ours[place].amax == pytest.approx(wanted.amax, rel=1e-4)
