"""Any run that the rules accept shrinks to one that they accept, with the same kinds of everything."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.soak import examples

from meshwright.rehearse.shrink import proof_optimizers, shrink
from meshwright.rehearse.small_worlds import MAX_RANKS, covering_worlds, small_world
from meshwright.spec import DataSpec, GroupSpec, MemorySpec, OptimSpec, ParallelSpec, RunSpec, ScheduleSpec
from meshwright.spec.check import check
from meshwright.spec.families import FAMILIES, family
from meshwright.spec.rules_parallel import LOOPED, V_SHAPED

FAMILY_NAMES = sorted(FAMILIES)
KINDS = ("adamw", "sgd", "adamw_8bit", "adafactor", "lars", "lamb", "muon")


def _divisors(number: int, most: int) -> list[int]:
    return [d for d in range(1, most + 1) if number % d == 0]


@st.composite
def runs(draw: st.DrawFn) -> RunSpec:
    """A family on a mesh of up to some thousands of ranks, with everything else drawn to fit."""
    model = family(draw(st.sampled_from(FAMILY_NAMES)))
    pick = lambda values: draw(st.sampled_from(list(values)))  # noqa: E731
    tp = pick(d for d in _divisors(model.attention.num_kv_heads, 16) if model.mlp.width % d == 0)
    tp = tp if model.moe is None or model.moe.shared_width % tp == 0 else 1
    model = model.with_(vocab_size=-(-model.vocab_size // tp) * tp)
    cp_kind = pick(("gather", "ring", "ulysses", "hierarchical"))
    ways = _divisors(model.attention.num_kv_heads // tp, 8)
    cp_inner = pick(ways) if cp_kind == "hierarchical" else 1
    cp = pick(ways) if cp_kind == "ulysses" else cp_inner * pick((1, 2, 4))
    if cp == 1 or (cp_kind == "hierarchical" and not 1 < cp_inner < cp):
        cp, cp_kind, cp_inner = 1, "gather", 1
    stripes = pick((1, 1, 4)) if cp > 1 and cp_kind == "gather" else 1
    dp_shard, zero = pick((1, 2, 3, 8, 64)), pick((1, 2, 3))
    schedule = pick(("gpipe", "1f1b", *LOOPED, *V_SHAPED))
    chunks = 2 if schedule in V_SHAPED else pick((1, 2, 3)) if schedule in LOOPED else 1
    pp = pick(d for d in (1, 1, 2, 3, 4, 8) if d * chunks <= model.num_layers)
    schedule, chunks = (schedule, chunks) if pp > 1 else ("1f1b", 1)
    lenders = dp_shard * cp
    ep = pick(d for d in _divisors(lenders, 64) if model.moe.num_experts % d == 0) if model.moe else 1
    parallel = ParallelSpec(
        dp_replicate=pick((1, 1, 2, 4)),
        dp_shard=dp_shard,
        zero=zero if lenders > 1 else 0,
        cp=cp,
        cp_kind=cp_kind,
        cp_inner=cp_inner,
        cp_stripes=stripes,
        tp=tp,
        pp=pp,
        schedule=schedule,
        virtual_stages=chunks,
        ep=ep,
        etp=tp if model.moe and model.moe.width % tp == 0 and draw(st.booleans()) else 1,
    )
    microbatch = pick((1, 2, 4))
    rounds = pick((1, 2, 5)) if pp == 1 else pick((1, pp, pp * chunks, 2 * pp * chunks))
    if parallel.zero >= 2 and rounds > 1:
        is_split = schedule in ("interleaved_zero_bubble", *V_SHAPED)
        parallel = parallel.with_(
            grad_reduce="last_microbatch" if is_split else pick(("each_microbatch", "last_microbatch"))
        )
    pieces = 2 * cp * stripes * tp
    length = pick((512, 1024)) // pieces * pieces
    recompute = "none" if schedule in ("interleaved_zero_bubble", *V_SHAPED) else pick(("none", "full"))
    return RunSpec(
        model=model.with_(max_positions=max(length, model.max_positions)),
        parallel=parallel,
        memory=MemorySpec(recompute=recompute, recompute_every=1 if recompute == "none" else pick((1, 3))),
        optim=OptimSpec(kind=pick(KINDS), groups=pick(((), (GroupSpec(pattern="*.7.*", lr_factor=2.0),)))),
        schedule=ScheduleSpec(num_steps=100),
        data=DataSpec(
            path="somewhere",
            sequence_length=length,
            batch_sequences=rounds * microbatch * parallel.dp,
            microbatch_sequences=microbatch,
            documents="separate" if stripes > 1 else "joined",
        ),
    )


@examples(40)
@given(run=runs())
def test_small_runs_pass_every_rule(run: RunSpec) -> None:
    if check(run):  # the few draws in which a rule between three settings is broken
        return
    for small in shrink(run, all_pairs=True):
        for optim in proof_optimizers(small.run.optim):
            assert not check(small.run.with_(optim=optim)), small.run
        assert small.run.parallel.num_ranks <= MAX_RANKS


@examples(30)
@given(run=runs())
def test_what_decides_the_program_stays(run: RunSpec) -> None:
    if check(run):
        return
    (small,) = (one.run for one in shrink(run))
    assert [again.run.parallel for again in shrink(small)] == [small.parallel]
    assert small.model.tied_head == run.model.tied_head
    assert (small.model.moe is None) == (run.model.moe is None)
    assert (small.model.attention.window is None) == (run.model.attention.window is None)
    assert small.memory.recompute == run.memory.recompute
    assert small.optim.kind == run.optim.kind
    if small.parallel.pp > 1:
        assert small.parallel.schedule == run.parallel.schedule
    if run.model.moe is not None:
        assert small.model.moe is not None
        assert bool(small.model.moe.first_dense_layers) == bool(run.model.moe.first_dense_layers)
        assert (small.model.moe.num_groups > 1) == (run.model.moe.num_groups > 1)


def test_most_draws_are_valid() -> None:
    """So that the properties above are not about nothing."""
    found: list[bool] = []

    @settings(max_examples=60, deadline=None, database=None, derandomize=True)
    @given(run=runs())
    def count(run: RunSpec) -> None:
        found.append(not check(run))

    count()
    assert sum(found) > 0.6 * len(found)


@pytest.mark.parametrize(
    ("large", "small"),
    [
        ({}, {}),
        ({"dp_shard": 64, "zero": 3}, {"dp_shard": 2, "zero": 3}),
        ({"tp": 8, "pp": 16}, {"tp": 2, "pp": 4}),
        ({"tp": 8, "pp": 8, "dp_replicate": 4}, {"tp": 2, "pp": 2, "dp_replicate": 2}),
        (
            {"tp": 8, "pp": 16, "cp": 16, "dp_shard": 4, "zero": 1},
            {"tp": 2, "pp": 2, "cp": 2, "zero": 1},
        ),
        (
            {"cp": 16, "cp_kind": "hierarchical", "cp_inner": 8},
            {"cp": 4, "cp_kind": "hierarchical", "cp_inner": 2},
        ),
        (
            {
                "pp": 8,
                "schedule": "zbv",
                "virtual_stages": 2,
                "dp_shard": 8,
                "zero": 2,
                "grad_reduce": "last_microbatch",
            },
            {
                "pp": 2,
                "schedule": "zbv",
                "virtual_stages": 2,
                "dp_shard": 2,
                "zero": 2,
                "grad_reduce": "last_microbatch",
            },
        ),
        ({"dp_shard": 64, "zero": 3, "ep": 8}, {"dp_shard": 4, "zero": 3, "ep": 2}),
        ({"dp_shard": 64, "zero": 3, "ep": 64}, {"dp_shard": 2, "zero": 3, "ep": 2}),
    ],
)
def test_one_small_world(large: dict, small: dict) -> None:
    assert small_world(ParallelSpec(**large)) == ParallelSpec(**small)


def test_all_pairs_of_axes_are_covered() -> None:
    large = ParallelSpec(pp=8, tp=8, cp=8, dp_shard=8, dp_replicate=2, zero=3)
    worlds = covering_worlds(large)
    axes = ("pp", "tp", "cp", "dp_shard", "dp_replicate")
    for one in axes:
        for other in axes:
            assert any(getattr(w, one) > 1 and getattr(w, other) > 1 for w in worlds), (one, other)
    assert all(world.num_ranks <= MAX_RANKS for world in worlds)
    assert worlds[0] == small_world(large)
    assert len(worlds) <= 4


def test_settings_of_an_axis_go_with_the_axis() -> None:
    run = RunSpec(
        model=family("llama-3.1-8b"),
        parallel=ParallelSpec(pp=2, tp=2, cp=2, dp_replicate=2, dp_shard=2, zero=3),
        memory=MemorySpec(regather_tp_inputs=True),
        schedule=ScheduleSpec(num_steps=10),
        data=DataSpec(path="x", sequence_length=1024, batch_sequences=64),
    )
    assert not check(run)
    smalls = shrink(run, all_pairs=True)
    assert all(not check(small.run) for small in smalls)
    without = [small for small in smalls if small.run.parallel.tp == 1]
    assert without
    assert all("memory.regather_tp_inputs True -> False" in small.changes for small in without)


def test_changes_are_listed(tmp_path) -> None:
    run = RunSpec(
        model=family("gpt2-124m").with_(dropout=0.1, vocab_size=50304),
        parallel=ParallelSpec(tp=4, dp_shard=64, zero=2),
        schedule=ScheduleSpec(num_steps=10),
        data=DataSpec(path="x", sequence_length=1024, batch_sequences=64),
    )
    (small,) = shrink(run)
    assert set(small.changes) == {
        "dp_shard 64 -> 2",
        "tp 4 -> 2",
        "no dropout: masks depend on the layout",
    }
