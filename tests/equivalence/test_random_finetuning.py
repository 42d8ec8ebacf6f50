"""Fine-tuning runs drawn from seeds: adapters, formats, layouts and savings of memory that no list pairs.

More or other trials: MESHWRIGHT_TEST_TRIALS=300 MESHWRIGHT_TEST_SEED=2 make soak.
"""

import dataclasses
import os
from unittest.mock import patch

import pytest
from tests.equivalence.test_fp8_base import exact_activations, exact_rows
from tests.support.equivalence import Result, assert_same_training, run_case, this_world, train_steps
from tests.support.oracle import Reference, reference
from tests.support.random_finetuning import PACKED, described, random_finetuning

from meshwright.mesh import build_mesh
from meshwright.models.layers import experts_stored
from meshwright.precision.fp8 import stored
from meshwright.rehearse.rank_pool import RankPool
from meshwright.spec import RunSpec

SEED = int(os.environ.get("MESHWRIGHT_TEST_SEED", "1"))
NUM_TRIALS = int(os.environ.get("MESHWRIGHT_TEST_TRIALS", "100"))
SEEDS = range(1000 * SEED, 1000 * SEED + NUM_TRIALS)
# The polynomial of muon amplifies small singular values, and rounding errors with them.
RTOL = {"muon": 5e-7}


def train_with_exact_activations(run: RunSpec) -> Result:
    """A base in fp8 without the rounding of activations: what remains is a rounded base in float64."""
    with (
        patch.object(stored, "quantise", exact_activations),
        patch.object(experts_stored, "quantise_rows", exact_rows),
    ):
        return train_steps(run, build_mesh(run.parallel, this_world()), 3)


def trained_weights(expected: Reference, found: list[Result]) -> tuple[Reference, list[Result]]:
    """Both without frozen weights: those of a packed base are bytes in one and numbers in the other."""
    names = expected.gradients[0].keys()

    def chosen(each: Reference | Result) -> dict[str, object]:
        return {"weights": {name: one for name, one in each.weights.items() if name in names}}

    return dataclasses.replace(expected, **chosen(expected)), [
        dataclasses.replace(one, **chosen(one)) for one in found
    ]


@pytest.mark.soak
@pytest.mark.parametrize("seed", SEEDS)
def test_equals_one_process(ranks: RankPool, seed: int) -> None:
    """Three steps equal merged weights, or dropped inputs by the definition, on one device in float64."""
    run = random_finetuning(seed)
    print(described(run))
    base = None if run.adapter is None else run.adapter.base
    if base == "fp8":
        results = ranks.run(train_with_exact_activations, run.parallel.num_ranks, run)
    else:
        results = run_case(ranks, run)
    expected = reference(run)
    if base in PACKED:
        expected, results = trained_weights(expected, results)
    assert_same_training(results, expected, rtol=RTOL.get(run.optim.kind, 1e-9))
