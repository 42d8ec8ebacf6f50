"""What expert parallelism sends: each token's row to its experts and back, and nothing else."""

from typing import Any

import pytest
from tests.support.equivalence import run_case
from tests.support.recorded_traffic import Recorder, axis_ranks
from tests.support.runs import MODELS, tiny_run

from meshwright.mesh import build_mesh
from meshwright.rehearse import steps
from meshwright.rehearse.rank_pool import this_world
from meshwright.spec import ParallelSpec, RunSpec
from meshwright.train.step import train_step

ELEMENT = 8  # float64 and int64


@pytest.mark.parametrize("dp_shard", (2, 4))
def test_rows_go_to_their_experts_and_back(ranks, dp_shard):
    run = tiny_run("moe", parallel=ParallelSpec(dp_shard=dp_shard, zero=1, ep=2))
    moe, model = run.model.moe, run.model
    assert moe is not None
    # Per routed layer and micro-batch: counts, rows with their weights to the experts, rows back; in backward
    # the gradients of all but the counts.
    exchanges = model.num_layers * run.accumulation
    results = run_case(ranks, run, records_traffic=True)
    sent = [
        [(size, count) for (kind, _, size), count in result.communication.items() if kind == "all_to_all"]
        for result in results
    ]
    for one in sent:
        assert sum(count for _, count in one) == 7 * exchanges
        assert dict(one)[moe.num_experts * ELEMENT] == exchanges
    # Over all ranks every choice of every token travels four times, and its weight twice.
    choices = run.data.batch_sequences * run.data.sequence_length * moe.top_k
    rows = (
        sum(size * count for one in sent for size, count in one)
        - len(sent) * exchanges * moe.num_experts * ELEMENT
    )
    assert rows == choices * (4 * model.width + 2) * ELEMENT * model.num_layers


def test_gradients_of_experts_stay_inside_their_replicas(ranks):
    """dp_shard=4 with ep=2: an expert is on two ranks, and only those two reduce its gradient."""
    run = tiny_run("moe", parallel=ParallelSpec(dp_shard=4, zero=1, ep=2))
    moe, width = MODELS["moe"].moe, run.model.width
    expert_bytes = 3 * moe.num_experts // 2 * moe.width * width * ELEMENT * run.model.num_layers
    for result in run_case(ranks, run, records_traffic=True):
        assert result.communication["reduce_scatter", "expert_shard", expert_bytes] == 1
        assert result.communication["all_gather", "expert_shard", expert_bytes] == 1


def test_gradients_of_experts_are_launched_within_the_backward(ranks):
    """Their bucket is full before the first layer's rows go back, and before the embedding's gradient."""
    run = tiny_run("moe", parallel=ParallelSpec(dp_shard=4, zero=1, ep=2))
    for calls in ranks.run(_recorded_calls, 4, run):
        launched = calls.index(("reduce_scatter", "expert_shard"))
        assert ("all_to_all", "ep") in calls[launched:]
        assert ("reduce_scatter", "shard") in calls[launched:]


def _recorded_calls(run: RunSpec) -> list[tuple[str, str]]:
    """(kind, axis) of the collectives of one step, in their order."""
    mesh, recorder = build_mesh(run.parallel, this_world()), Recorder()

    def recorded(*args: Any, **kwargs: Any) -> Any:
        with recorder:
            return train_step(*args, **kwargs)

    steps.train_steps(run, mesh, 1, step=recorded)
    names = {ranks: axis for axis, ranks in axis_ranks(mesh).items() if axis in ("ep", "expert_shard")}
    return [(call.kind, names.get(call.ranks, "shard")) for call in recorder.calls]


def test_a_dense_rank_sends_no_rows(ranks):
    results = run_case(
        ranks, tiny_run("moe", parallel=ParallelSpec(dp_shard=2, zero=1)), records_traffic=True
    )
    assert not [kind for kind, _, _ in results[0].communication if kind == "all_to_all"]
