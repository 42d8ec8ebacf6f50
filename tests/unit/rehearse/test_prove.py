"""The proof holds for sound layouts, and a planted mistake turns it red with the parameter named."""

import pytest
import torch.distributed as dist

from meshwright.errors import EXIT_RUN_FAILED, RunError
from meshwright.rehearse import prove as proving
from meshwright.rehearse.prove import layout_text, prove, require_proved, train_here
from meshwright.rehearse.shrink import shrink
from meshwright.spec import DataSpec, MemorySpec, ParallelSpec, RunSpec, ScheduleSpec
from meshwright.spec.families import family
from meshwright.spec.text import load_run


def large_run(name: str, parallel: ParallelSpec, **changes: object) -> RunSpec:
    """A run of hundreds of ranks."""
    model = family(name)
    run = RunSpec(
        model=model.with_(vocab_size=-(-model.vocab_size // 64) * 64),
        parallel=parallel,
        schedule=ScheduleSpec(num_steps=100),
        data=DataSpec(path="nowhere", sequence_length=1024, batch_sequences=64 * parallel.dp),
    )
    return run.with_(**changes)


# Two pipeline stages, since eight ranks take their time on few cores; test_shrink has the worlds with four.
DENSE = large_run("llama-3.1-8b", ParallelSpec(pp=2, tp=8), memory=MemorySpec(recompute="full"))
ROUTED = large_run("qwen3-30b-a3b", ParallelSpec(dp_shard=64, zero=3, ep=64))


def _scaled_sums(runs, num_steps):
    """Every sum over more than one rank comes out a little too large."""
    genuine = dist.all_reduce

    def scaled(tensor, *args, **kwargs):
        work = genuine(tensor, *args, **kwargs)
        if dist.get_world_size() > 1 and tensor.is_floating_point():
            tensor.mul_(1.001)
        return work

    dist.all_reduce = scaled
    try:
        return train_here(runs, num_steps)
    finally:
        dist.all_reduce = genuine


def _dies(runs, num_steps):
    raise RuntimeError("planted")


@pytest.fixture(scope="module")
def verdicts(ranks):
    """Both small runs on the pool of the tests."""
    pool = KeptPool(ranks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proving, "RankPool", lambda **_: pool)
        yield list(prove([*shrink(DENSE), *shrink(ROUTED)]))


class KeptPool:
    """The shared pool, which no proof may close."""

    def __init__(self, pool):
        self.run = pool.run

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def test_the_line_names_what_was_proved(verdicts):
    dense, routed = verdicts
    assert dense.holds and routed.holds
    assert dense.line.startswith(
        "pp2 x tp2, 1f1b on 4 gloo ranks: loss, 30 gradients and weights after 3 steps of sgd and adamw "
        "equal one device to "
    )
    assert routed.line.startswith("dp_shard2, zero 3, ep2 on 2 gloo ranks: loss, ")
    assert max(routed.errors.values()) < 1e-9


def test_everything_is_compared(verdicts):
    for verdict in verdicts:
        names = " ".join(verdict.errors)
        for part in ("step 2 loss", "step 0 gradient embedding", "weights head", "exp_avg_sq", "eval loss"):
            assert part in names


def test_a_wrong_sum_fails_the_proof(ranks, monkeypatch):
    monkeypatch.setattr(proving, "RankPool", lambda **_: KeptPool(ranks))
    large = large_run("gpt2-124m", ParallelSpec(dp_replicate=16))
    (verdict,) = prove(shrink(large), job=_scaled_sums)
    assert not verdict.holds
    name, error = verdict.worst
    assert error > 1e-4
    assert f"the worst is {name}, by " in verdict.line
    with pytest.raises(RunError, match=r"the proof failed: dp_replicate2 on 2 gloo ranks") as caught:
        require_proved(verdict)
    assert caught.value.exit_code == EXIT_RUN_FAILED
    kept = load_run(caught.value.where)
    assert kept == verdict.shrunken.run
    assert [small.run.parallel for small in shrink(kept)] == [kept.parallel]


def test_a_rank_that_fails_is_reported_without_a_traceback(ranks, monkeypatch):
    monkeypatch.setattr(proving, "RankPool", lambda **_: KeptPool(ranks))
    large = large_run("gpt2-124m", ParallelSpec(dp_replicate=16))
    with pytest.raises(RunError, match="a rank of the proof failed: RuntimeError: planted") as caught:
        list(prove(shrink(large), job=_dies))
    assert "the tracebacks of all ranks are in " in caught.value.hint


@pytest.mark.parametrize(
    ("parallel", "text"),
    [
        (ParallelSpec(), "one rank"),
        (ParallelSpec(dp_shard=2, zero=3), "dp_shard2, zero 3"),
        (
            ParallelSpec(pp=2, schedule="zbv", virtual_stages=2, cp=2, cp_kind="ring", tp=2),
            "pp2 x cp2 x tp2, zbv, cp by ring",
        ),
        (
            ParallelSpec(dp_replicate=2, dp_shard=2, zero=1, ep=2, tp=2, etp=2),
            "dp_replicate2 x dp_shard2 x tp2, zero 1, ep2, etp2",
        ),
    ],
)
def test_layouts_as_text(parallel, text):
    assert layout_text(parallel) == text
