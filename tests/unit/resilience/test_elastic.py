"""The mesh for a number of ranks, and which devices are left out after failures."""

import pytest
import torch
from tests.support.runs import tiny_run

from meshwright.launch.attempt import AttemptEnd
from meshwright.launch.local import VISIBLE_DEVICES, visible_devices
from meshwright.mesh import choose_device
from meshwright.resilience.elastic import mesh_text, overrides, run_on
from meshwright.spec import RunSpec
from meshwright.spec.parallel import ParallelSpec
from meshwright.train.elastic_ranks import ElasticRanks


def _run(batch: int = 24, *, min_ranks: int = 1, spares: int = 0, **axes: int) -> RunSpec:
    run = tiny_run("gqa")
    elastic = {
        "min_ranks": min_ranks,
        "spare_ranks": spares,
        "failures_per_device": 2,
        "return_seconds": 100,
    }
    return run.with_(
        parallel=ParallelSpec(**axes),
        data=run.data.with_(batch_sequences=batch, microbatch_sequences=1),
        resilience=run.resilience.with_(elastic=elastic),
    )


@pytest.mark.parametrize(
    ("axes", "num_ranks", "found"),
    [
        ({"dp_replicate": 4}, 4, {"dp_replicate": 4}),
        ({"dp_replicate": 4}, 3, {"dp_replicate": 3}),
        ({"dp_replicate": 8}, 7, {"dp_replicate": 6}),
        ({"dp_replicate": 2, "tp": 2}, 3, {"dp_replicate": 1, "tp": 2}),
        ({"dp_shard": 4, "zero": 3}, 3, {"dp_shard": 3, "zero": 3}),
        ({"dp_shard": 4, "zero": 3}, 1, {}),
        ({"dp_shard": 2, "dp_replicate": 3, "zero": 2}, 4, {"dp_shard": 2, "dp_replicate": 2, "zero": 2}),
        ({"dp_shard": 2, "dp_replicate": 3, "zero": 2}, 3, {"dp_shard": 3, "zero": 2}),
    ],
)
def test_dp_shrinks_to_what_divides_the_batch_and_other_axes_stay(axes, num_ranks, found):
    smaller = run_on(_run(**axes), num_ranks)
    assert smaller is not None and smaller.parallel == ParallelSpec(**found)
    assert smaller.data == _run().data, "the same batch, in more micro-batches per rank"


def test_there_is_no_mesh_below_the_limit_or_for_fewer_ranks_than_the_model_needs():
    assert run_on(_run(min_ranks=3, dp_replicate=4), 2) is None
    assert run_on(_run(batch=8, min_ranks=3, dp_replicate=4), 3) is None, "3 does not divide 8, 2 is too few"
    assert run_on(_run(tp=2, dp_replicate=2), 1) is None
    assert run_on(_run(dp_replicate=8), 7, multiple_of=4).parallel.dp_replicate == 4


def test_settings_without_effect_on_the_smaller_mesh_go_back_to_their_defaults():
    run = _run(dp_replicate=2)
    run = run.with_(resilience=run.resilience.with_(compare_replicas_every_steps=10))
    smaller = run_on(run, 1)
    assert smaller is not None and smaller.resilience.compare_replicas_every_steps is None
    assert overrides(run, smaller) == [
        "parallel.dp_replicate=1",
        "resilience.compare_replicas_every_steps=null",
    ]


def test_the_text_of_a_mesh():
    assert mesh_text(ParallelSpec(dp_replicate=3, tp=2)) == "6 ranks (dp_replicate=3 tp=2)"
    assert mesh_text(ParallelSpec()) == "1 rank"


def _failed(rank: int | None, cause="killed") -> AttemptEnd:
    return AttemptEnd(cause, 4, "rank failed", 5, rank)


def test_a_device_that_keeps_failing_is_left_out_and_returns_later_for_longer_each_time():
    now = [0.0]
    ranks = ElasticRanks(_run(min_ranks=2, dp_replicate=4), clock=lambda: now[0])
    assert ranks.after(_failed(2)) == "" and ranks.devices == (0, 1, 2, 3), "once is chance"
    text = ranks.after(_failed(2))
    assert text == "device 2 is left out; 4 ranks (dp_replicate=4) -> 3 ranks (dp_replicate=3)"
    assert ranks.devices == (0, 1, 3) and ranks.overrides == ["parallel.dp_replicate=3"]
    now[0] = 99.0
    assert ranks.change() is None
    now[0] = 101.0
    found = ranks.change()
    assert found is not None and found.cause == "resized" and found.saves
    assert ranks.after(AttemptEnd("resized", 0, found.text)) and ranks.devices == (0, 1, 2, 3)
    ranks.after(_failed(2))
    assert ranks.devices == (0, 1, 3), "one failure after its return is enough"
    now[0] = 101.0 + 199.0
    assert ranks.change() is None
    now[0] = 101.0 + 201.0
    assert ranks.change() is not None


def test_failures_of_other_devices_in_between_and_of_several_ranks_blame_none():
    ranks = ElasticRanks(_run(dp_replicate=4))
    for rank in (2, 1, 2, None, 3, 2):
        assert ranks.after(_failed(rank)) == ""
    assert ranks.after(_failed(2, "lost_rank")) == "" and ranks.devices == (0, 1, 2, 3)


def test_a_spare_replaces_a_device_and_the_mesh_stays():
    ranks = ElasticRanks(_run(min_ranks=4, spares=1, dp_replicate=4))
    assert ranks.devices == (0, 1, 2, 3)
    ranks.after(_failed(0))
    text = ranks.after(_failed(0))
    assert "device 0 is left out" in text and ranks.devices == (1, 2, 3, 4) and ranks.overrides == []
    ranks.after(_failed(0))
    ranks.after(_failed(0))
    assert ranks.devices == (1, 2, 3, 4), "no device is left out where too few would be left"


@pytest.mark.parametrize("seen", ["", "4,5,6,7"])
def test_ranks_have_devices_of_their_own_after_a_device_was_left_out(monkeypatch, seen):
    """With 4 GPUs, faked: the rank with local rank r opens the r-th of those that it is shown."""
    monkeypatch.setenv(VISIBLE_DEVICES, seen)
    ranks = ElasticRanks(_run(min_ranks=2, dp_replicate=4))
    ranks.after(_failed(1))
    ranks.after(_failed(1))
    shown = visible_devices(ranks.devices)[VISIBLE_DEVICES].split(",")
    assert shown == (["4", "6", "7"] if seen else ["0", "2", "3"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(shown))
    chosen = [choose_device("cuda", rank).index for rank in range(ranks.run.parallel.num_ranks)]
    assert chosen == [0, 1, 2]


def test_without_elastic_nothing_changes():
    run = tiny_run("gqa").with_(parallel=ParallelSpec(dp_replicate=2))
    ranks = ElasticRanks(run)
    assert [ranks.after(_failed(1)) for _ in range(3)] == ["", "", ""]
    assert ranks.devices is None and ranks.change() is None and ranks.overrides == []


def test_a_smaller_microbatch_is_kept_when_the_mesh_changes():
    run = _run(dp_replicate=4).with_(
        data=_run(dp_replicate=4).data.with_(microbatch_sequences=2),
        memory=_run(dp_replicate=4).memory.with_(on_oom="halve_microbatch"),
    )
    ranks = ElasticRanks(run)
    half = run.with_(data=run.data.with_(microbatch_sequences=1), memory=run.memory.with_(on_oom="stop"))
    ranks.shrink_microbatch(half)
    ranks.after(_failed(1))
    ranks.after(_failed(1))
    assert ranks.overrides == [
        "data.microbatch_sequences=1",
        'memory.on_oom="stop"',
        "parallel.dp_replicate=3",
    ]
