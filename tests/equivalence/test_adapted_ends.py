"""Adapters on embedding and head, and trained rows of single tokens, equal merged weights on any mesh."""

import pytest
from tests.support.equivalence import prove
from tests.support.layouts import Layout, all_singles
from tests.support.runs import OPTIMIZERS, VOCAB_SIZE

from meshwright.rehearse.rank_pool import RankPool
from meshwright.spec import AdapterSpec, MemorySpec, ParallelSpec, RunSpec
from meshwright.spec.check import check

ENDS = AdapterSpec(rank=3, alpha=8, targets=("embedding", "head", "query"))
# Not in order, some that the data has and one that it has not; tp ranks have different numbers of them.
TOKENS = AdapterSpec(rank=3, alpha=8, targets=("query",), tokens=(40, 3, 17, 11, VOCAB_SIZE - 1))
BOTH = {"ends": ENDS, "tokens": TOKENS}


def run_of(kind: str, model: str, **parallel: object) -> RunSpec:
    layout = Layout(ParallelSpec.model_validate(parallel), model)
    return layout.run().with_(adapter=BOTH[kind])


CASES = {
    "ends-one-gqa": run_of("ends", "gqa"),
    "ends-one-tied": run_of("ends", "tied"),
    "ends-pp2-tied": run_of("ends", "tied", pp=2),
    "ends-zero3-tp2-gqa": run_of("ends", "gqa", dp_shard=2, zero=3, tp=2),
    "tokens-one-gqa": run_of("tokens", "gqa"),
    "tokens-cp2-tied": run_of("tokens", "tied", cp=2).with_(memory=MemorySpec(recompute="full")),
    "tokens-pp2-tied": run_of("tokens", "tied", pp=2),
    "tokens-zero1-gqa": run_of("tokens", "gqa", dp_shard=2, zero=1).with_(
        optim=OPTIMIZERS["adamw"].with_(ema_decay=0.5)
    ),
    "tokens-zero3-tp2-gqa": run_of("tokens", "gqa", dp_shard=2, zero=3, tp=2),
}
QUICK = ("ends-one-tied", "ends-pp2-tied", "ends-zero3-tp2-gqa", "tokens-pp2-tied", "tokens-zero3-tp2-gqa")


@pytest.mark.parametrize(
    "case", [pytest.param(one, marks=() if one in QUICK else pytest.mark.soak) for one in CASES]
)
def test_equal_merged_weights(ranks: RankPool, case: str) -> None:
    results = prove(ranks, CASES[case])
    trained = {name for result in results for name in result.gradients[0]}
    assert all(".adapter." in name or name.endswith(".token_rows.change") for name in trained)


EVERY = all_singles()


@pytest.mark.soak
@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("case", EVERY, ids=[one.name for one in EVERY])
def test_every_axis(ranks: RankPool, case: Layout, kind: str) -> None:
    run = case.run().with_(adapter=BOTH[kind].with_(targets=("all-linear", *BOTH[kind].targets[:-1])))
    if refused := check(run):
        pytest.skip(refused[0].fact)
    prove(ranks, run)
