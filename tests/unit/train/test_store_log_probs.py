"""The stored reference of a preference dataset is the same from any mesh."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from tests.support.pairs import pair_dataset, pair_run

from meshwright.spec import ParallelSpec, PreferenceSpec, RunSpec
from meshwright.train.store_log_probs import store_log_probs

LAYOUTS = {
    "dp2": ParallelSpec(dp_shard=2, zero=3),
    "tp2": ParallelSpec(tp=2),
    "pp2": ParallelSpec(pp=2),
    "dp2-cp2": ParallelSpec(dp_replicate=2, cp=2),
}


def stored_here(run: RunSpec) -> int:
    return store_log_probs(run, force=False, progress=lambda *_: None)


def test_every_mesh_stores_the_same_log_probs(ranks, tmp_path: Path):
    tables = {}
    for name, parallel in {"one": ParallelSpec(), **LAYOUTS}.items():
        dataset = tmp_path / name
        shutil.copytree(pair_dataset(), dataset)
        run = pair_run(PreferenceSpec(beta=0.5))
        run = run.with_(parallel=parallel, data=run.data.with_(path=str(dataset)))
        counts = ranks.run(stored_here, parallel.num_ranks, run)
        tables[name] = np.load(dataset / "reference_logprobs.npy")
        assert set(counts) == {len(tables[name])}
    assert np.isfinite(tables["one"]).all() and (tables["one"] < 0).all()
    for name in LAYOUTS:
        # fp64 sums in another order
        assert tables[name] == pytest.approx(tables["one"], rel=1e-12), name
