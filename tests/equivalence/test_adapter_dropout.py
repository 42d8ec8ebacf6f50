"""Adapters with dropout on any mesh train what one device trains: masks do not depend on the mesh."""

import pytest
from tests.equivalence import test_compiled
from tests.equivalence.test_adapters import EVERY, WIDE, WIDE_EXPERTS, layout, only_adapters, quick
from tests.support.equivalence import assert_same_training, prove, run_case
from tests.support.layouts import SCHEDULES, Layout
from tests.support.oracle import reference
from tests.support.runs import OPTIMIZERS, few_microbatches, tiny_run

from meshwright.rehearse.rank_pool import RankPool
from meshwright.spec import AdapterSpec, MemorySpec, ParallelSpec, RunSpec
from meshwright.spec.check import check

LORA = AdapterSpec(rank=3, alpha=8, dropout=0.1)
DORA = LORA.with_(kind="dora")
ENDS = LORA.with_(targets=("all-linear", "embedding", "head"))


def adapted(layout: Layout, adapter: AdapterSpec = LORA, **changes: object) -> RunSpec:
    return layout.run().with_(adapter=adapter, **changes)


CASES = {
    "gqa": adapted(layout("gqa")),
    "gqa-dora": adapted(layout("gqa"), DORA, memory=MemorySpec(recompute="selective")),
    "gpt-dora": adapted(layout("gpt"), DORA),
    "mla-recompute": adapted(layout("mla"), memory=MemorySpec(recompute="full")),
    "gqa-offload": adapted(
        layout("gqa"), memory=MemorySpec(offload=("optimizer", "activations", "parameters"))
    ),
    "moe_shared-dora": adapted(layout("moe_shared"), DORA),
    "dp2-gqa": adapted(layout("gqa", dp_replicate=2)),
    "zero1-gqa": adapted(layout("gqa", dp_shard=2, zero=1), optim=OPTIMIZERS["adamw"]),
    "zero2-gqa": adapted(layout("gqa", dp_shard=2, zero=2)),
    "zero3-gqa-dora": adapted(layout("gqa", dp_shard=2, zero=3), DORA, memory=MemorySpec(recompute="full")),
    "tp2-gqa": adapted(layout("gqa", tp=2)),
    "tp2-tied-ends": adapted(layout("tied", tp=2), ENDS),
    "tp2-gpt-dora": adapted(layout("gpt", tp=2), DORA),
    "tp2-mla-regather": adapted(layout("mla", tp=2), memory=MemorySpec(regather_tp_inputs=True)),
    "tp2-moe_shared": adapted(layout("moe_shared", tp=2)),
    "tp2-etp2-moe_shared-dora": adapted(layout("moe_shared", tp=2, etp=2), DORA),
    "cp2-gqa": adapted(layout("gqa", cp=2), memory=MemorySpec(recompute="selective")),
    "cp2-ulysses-gqa": adapted(layout("gqa", cp=2, cp_kind="ulysses"), DORA),
    "ep2-moe": adapted(layout("moe", dp_shard=2, zero=1, ep=2)),
    "ep2-shared-overlap-moe_shared": adapted(
        layout("moe_shared", dp_shard=2, zero=1, ep=2, ep_overlap="shared")
    ),
    "ep2-halves-moe_shared-dora": adapted(
        layout("moe_shared", dp_shard=2, zero=3, ep=2, ep_overlap="halves"), DORA
    ),
    "pp2-1f1b-tied": adapted(layout("tied", pp=2), ENDS, memory=MemorySpec(recompute="full")),
    **{
        f"pp2-{schedule}-gqa": adapted(layout("gqa", pp=2, schedule=schedule, virtual_stages=stages))
        for schedule, stages in SCHEDULES.items()
        if schedule != "1f1b"
    },
    "pp2-split-backward-tied-dora": adapted(
        layout("tied", pp=2, schedule="interleaved_zero_bubble", virtual_stages=2), DORA
    ),
    "zero3-tp2-gqa": adapted(layout("gqa", dp_shard=2, zero=3, tp=2)),
    "tp2-cp2-gqa": adapted(layout("gqa", tp=2, cp=2), DORA),
    "pp2-tp2-gqa": adapted(layout("gqa", pp=2, tp=2), memory=MemorySpec(recompute="full")),
    "tp2-etp2-ep2-moe": adapted(layout("moe", dp_shard=2, zero=1, tp=2, etp=2, ep=2)),
}


# Second variants of what the others have in pairs; soak runs all.
SECOND = (
    *("gpt-dora", "gqa-offload", "zero1-gqa", "tp2-gpt-dora", "cp2-ulysses-gqa", "pp2-gpipe-gqa"),
    *(
        "pp2-looped_bfs-gqa",
        "pp2-interleaved_1f1b-gqa",
        "pp2-dualpipev-gqa",
        "pp2-interleaved_zero_bubble-gqa",
    ),
)


@pytest.mark.parametrize("case", quick(CASES, SECOND))
def test_masks_are_those_of_one_device(ranks: RankPool, case: str) -> None:
    """Loss, gradients and weights of three steps equal the oracle's, whose masks are by the definition."""
    prove(ranks, CASES[case])


def test_another_split_into_microbatches(ranks: RankPool) -> None:
    """The masks follow a sequence's place in the global batch, also while the batch grows."""
    for sequences, dp in ((4, 1), (1, 2)):
        parallel = ParallelSpec(dp_replicate=dp)
        run = tiny_run(parallel=parallel, microbatch_sequences=sequences, ramp=((2, 4),), adapter=LORA)
        prove(ranks, run)


COMPILED = {
    "gqa-selective": adapted(layout("gqa"), compile=True, memory=MemorySpec(recompute="selective")),
    "zero3-gqa-dora": adapted(layout("gqa", dp_shard=2, zero=3), DORA, compile=True),
    "tp2-gqa": adapted(layout("gqa", tp=2), compile=True, memory=MemorySpec(recompute="full")),
    "moe_shared": adapted(layout("moe_shared"), compile=True),
    # Only parts of routed blocks are compiled, and two functions of the experts read one probability.
    "ep2-moe-dora": adapted(
        layout("moe", dp_shard=2, zero=1, ep=2), DORA, compile=True, memory=MemorySpec(recompute="full")
    ),
}


@pytest.mark.parametrize("case", quick(COMPILED, ("gqa-selective", "zero3-gqa-dora", "moe_shared")))
def test_compiled_blocks_have_the_same_masks(ranks: RankPool, case: str) -> None:
    run = COMPILED[case]
    answers = ranks.run(test_compiled._train_compiled, run.parallel.num_ranks, run, 3)
    assert all(num_graphs > 0 for _, num_graphs in answers)
    assert_same_training([result for result, _ in answers], reference(run))


QLORA = {
    "tp2-dora": tiny_run(WIDE, parallel=ParallelSpec(tp=2), adapter=DORA.with_(base="nf4")),
    "moe-ep2-dora": tiny_run(
        WIDE_EXPERTS,
        parallel=ParallelSpec(dp_shard=2, zero=3, ep=2),
        microbatch_sequences=few_microbatches(ParallelSpec(dp_shard=2)),
        adapter=DORA.with_(base="nf4"),
    ),
}


@pytest.mark.parametrize("case", quick(QLORA, ("moe-ep2-dora",)))
def test_a_base_in_nf4(ranks: RankPool, case: str) -> None:
    results = run_case(ranks, QLORA[case])
    expected = only_adapters(reference(QLORA[case]))
    assert_same_training([only_adapters(result) for result in results], expected)


@pytest.mark.soak
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
@pytest.mark.parametrize("case", EVERY, ids=[one.name for one in EVERY])
def test_every_pair_of_axes(ranks: RankPool, case: Layout, recompute: str) -> None:
    run = adapted(case, DORA, memory=MemorySpec(recompute=recompute))
    if refused := check(run):
        pytest.skip(refused[0].fact)
    prove(ranks, run)
