"""Training on preference pairs equals a hand-written training, one answer at a time, on every axis."""

import math

import pytest
import torch
from tests.support.equivalence import assert_ranks_agree, run_case
from tests.support.pairs import expected_training, pair_run
from tests.support.soak import soak

from meshwright.spec import AdapterSpec, ParallelSpec, PreferenceSpec

DPO = PreferenceSpec(beta=0.5, label_smoothing=0.1, nll_weight=0.2)
LOSSES = {
    "ipo": PreferenceSpec(loss="ipo", beta=0.5),
    "simpo": PreferenceSpec(loss="simpo", beta=2.0, margin=0.5),
    "orpo": PreferenceSpec(loss="orpo", beta=0.3),
}
LAYOUTS = {
    "one": (ParallelSpec(), 1),
    "one_microbatch": (ParallelSpec(), 8),
    "replicate_2": (ParallelSpec(dp_replicate=2), 2),
    "zero_3": (ParallelSpec(dp_shard=2, zero=3), 2),
    "tp_2": (ParallelSpec(tp=2), 2),
    "cp_2": (ParallelSpec(cp=2), 2),
    "pp_2": (ParallelSpec(pp=2), 2),
    "tp_2_cp_2": (ParallelSpec(tp=2, cp=2), 4),
    "replicate_2_tp_2": (ParallelSpec(dp_replicate=2, tp=2), 2),
    "replicate_2_pp_2": (ParallelSpec(dp_replicate=2, pp=2), 1),
    "zero_3_cp_2": (ParallelSpec(dp_shard=2, zero=3, cp=2), 2),
    "tp_2_pp_2": (ParallelSpec(tp=2, pp=2), 2),
    "cp_2_pp_2": (ParallelSpec(cp=2, pp=2), 2),
}


def prove(ranks, preference: PreferenceSpec, parallel: ParallelSpec, microbatch_sequences: int) -> None:
    run = pair_run(preference, parallel, microbatch_sequences=microbatch_sequences)
    results = run_case(ranks, run)
    assert_ranks_agree(results)
    losses, weights, held_out = expected_training(run, results[0].sample_ids)
    for result in results:
        assert result.losses == pytest.approx(losses, rel=1e-9)
        assert result.eval_loss == pytest.approx(held_out, rel=1e-9)
        for name, weight in result.weights.items():
            torch.testing.assert_close(weight, weights[name], rtol=1e-9, atol=1e-12)


# Their axes are tried alone here, and these mixes with documents in test_layouts.py.
WIDE = ("replicate_2_tp_2", "replicate_2_pp_2", "cp_2_pp_2")


@pytest.mark.parametrize("layout", [soak(name) if name in WIDE else name for name in LAYOUTS])
def test_every_axis_equals_pairs_by_hand(ranks, layout):
    prove(ranks, DPO, *LAYOUTS[layout])


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_equals_pairs_by_hand(ranks, loss):
    prove(ranks, LOSSES[loss], *LAYOUTS["tp_2"])


def test_adapters_train_on_pairs(ranks):
    """An adapter starts at zero, so the reference is the base: the first loss is log 2."""
    adapter = AdapterSpec(rank=3, alpha=8)
    runs = {
        name: pair_run(PreferenceSpec(beta=0.5), LAYOUTS[name][0]).with_(adapter=adapter)
        for name in ("one", "tp_2", "pp_2")
    }
    losses = {name: run_case(ranks, run)[0].losses for name, run in runs.items()}
    assert losses["one"][0] == pytest.approx(math.log(2), rel=1e-9)
    assert losses["one"][-1] != losses["one"][0]
    assert losses["tp_2"] == pytest.approx(losses["one"], rel=1e-9)
    assert losses["pp_2"] == pytest.approx(losses["one"], rel=1e-9)
