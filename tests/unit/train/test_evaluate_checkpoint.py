"""The loss of a checkpoint is the same on any mesh, and that of the run's own evaluation."""

from pathlib import Path

import pytest
from tests.support.run_directories import attempt
from tests.support.runs import OPTIMIZERS, ragged_dataset, tiny_run

from meshwright.observe.metrics import read_metrics
from meshwright.spec import ObserveSpec, ParallelSpec
from meshwright.train.evaluate_checkpoint import Evaluation, evaluate_weights, evaluation_run

LAYOUTS = (ParallelSpec(), ParallelSpec(dp_shard=2, zero=3), ParallelSpec(tp=2), ParallelSpec(pp=2))


def evaluated_here(directory: Path, overrides: list[str], data: str | None) -> Evaluation:
    run = evaluation_run(directory, overrides, data=data, step=None, num_ranks=1)
    return evaluate_weights(run, averaged=False)


def overrides(parallel: ParallelSpec) -> list[str]:
    chosen = parallel.model_dump(exclude_defaults=True) | {"dp_replicate": 1}
    return [*(f"parallel.{key}={value}" for key, value in chosen.items()), "data.batch_sequences=8"]


def test_every_mesh_has_the_same_loss(ranks, tmp_path):
    evaluate = ObserveSpec.model_validate({"evaluate": {"every_steps": 6}})
    run = tiny_run("gqa", optim=OPTIMIZERS["adamw"], observe=evaluate)
    attempt(ranks, run, tmp_path)
    recorded = read_metrics(tmp_path)[-1]["eval_loss"]
    for data, sequences in ((None, 3), (ragged_dataset(25), 25)):
        results = [
            ranks.run(evaluated_here, one.num_ranks, tmp_path, overrides(one), data)[0] for one in LAYOUTS
        ]
        assert {(one.tokens, one.sequences, one.step) for one in results} == {
            (results[0].tokens, sequences, 6)
        }
        for one in results:
            assert one.loss == pytest.approx(results[0].loss, rel=1e-12)
        if data is None:
            assert results[0].loss == recorded
