"""The stream of samples is exact through cuts, other ranks and workers, and kills: digests are compared.

Cuts are at borders and at random steps. Another seed: MESHWRIGHT_TEST_SEED=2. The full product is a long
trial (`make soak`).
"""

import itertools
import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.ledger import Ranks, ledger, words
from tests.support.run_directories import (
    assert_same_state,
    attempt,
    dying_at_disk_call,
    killed_after,
    train_here,
)
from tests.support.runs import OPTIMIZERS, ragged_dataset, tiny_run
from tests.support.token_ledger import TokenRanks
from torch import Tensor, nn

import meshwright
from meshwright.data.loader import open_loader
from meshwright.data.order import Blocks
from meshwright.data.record_sets import JoinedRecords
from meshwright.data.records import Record
from meshwright.rehearse.rank_pool import RankPool
from meshwright.spec import CheckpointSpec, DataSpec, ParallelSpec, PrecisionSpec, RunSpec, ScheduleSpec

SEED = int(os.environ.get("MESHWRIGHT_TEST_SEED", "1"))
STEPS = 14
CHAIN = (2, 1, 4, 3, 8, 6, 2)
"""Rank counts of an elastic chain, two steps on each, at a global batch of 24."""

BLENDS: dict[str, dict[str, Any]] = {
    "one": {"synthetic": {"num_documents": 24}},
    "two": {
        "blend": [
            {"synthetic": {"num_documents": 20}, "weight": 0.7},
            {"synthetic": {"num_documents": 8, "seed": 1}, "weight": 0.3},
        ]
    },
    "one ends": {
        "blend": [
            {"synthetic": {"num_documents": 20}, "weight": 0.6},
            {"synthetic": {"num_documents": 3, "seed": 1}, "weight": 0.4, "repeat": False},
        ]
    },
    "curriculum": {
        "blend": [
            {"synthetic": {"num_documents": 20}, "weight": 0.5},
            {"synthetic": {"num_documents": 8, "seed": 1}, "weight": 0.5},
        ],
        "curriculum": [{"before_step": 5, "weights": [1, 0]}],
    },
}
SHUFFLES: dict[str, Any] = {"full": True, "block": {"block_samples": 32, "window_blocks": 4}, "off": False}
# Every pair of choices of blend, packing and shuffle occurs.
CASES = [
    ("one", "whole", "full"),
    ("one", "cut", "block"),
    ("two", "whole", "block"),
    ("two", "cut", "off"),
    ("one ends", "whole", "off"),
    ("one ends", "cut", "full"),
    ("curriculum", "whole", "full"),
    ("curriculum", "cut", "block"),
]


def token_spec(blend: str, packing: str, shuffle: str) -> DataSpec:
    """24 sequences of 128 tokens per step, so that sources and packs end within the steps."""
    settings = {"sequence_length": 128, "batch_sequences": 24, "packing": packing}
    return DataSpec.model_validate({**BLENDS[blend], **settings, "shuffle": SHUFFLES[shuffle]})


def check_token_chain(case: tuple[str, str, str], seed: int) -> None:
    """Random hops: a run is cut after random numbers of steps and continued on other rank counts."""
    spec, generator = token_spec(*case), random.Random(f"{case} {seed}")
    golden = TokenRanks(spec, 1)
    expected, found, state = golden.steps(STEPS), [], None
    golden.close()
    while len(found) < STEPS:
        ranks = TokenRanks(spec, generator.choice((1, 2, 3, 4, 6, 8)))
        if state is not None:
            ranks.restore(state)
            assert ranks.state() == state  # save -> load -> save
        found += ranks.steps(min(generator.randint(1, 5), STEPS - len(found)))
        state = json.loads(json.dumps(ranks.state()))
        ranks.close()
    assert found == expected


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_token_streams_survive_random_cuts_on_other_ranks(case: tuple[str, str, str]) -> None:
    """Blend, packing and shuffle: every tensor of every row, with prefetched batches thrown away."""
    check_token_chain(case, SEED)


@pytest.mark.parametrize("packing", ["whole", "cut"])
def test_the_elastic_chain_of_packed_tokens(packing: str) -> None:
    """2 -> 1 -> 4 -> 3 -> 8 -> 6 -> 2 ranks at a global batch of 24, saved after every step."""
    spec = token_spec("two", packing, "full")
    golden = TokenRanks(spec, 1)
    expected, found, state = golden.steps(2 * len(CHAIN)), [], golden.ranks[0].state() | {"position": 0}
    state |= {"num_batches": 0}
    golden.close()
    for num_ranks in CHAIN:
        ranks = TokenRanks(spec, num_ranks)
        ranks.restore(state)
        for _ in range(2):
            found.append(ranks.step())
            state = ranks.state()
        ranks.close()
    assert found == expected


@pytest.mark.soak
@pytest.mark.parametrize("trial", range(4))
@pytest.mark.parametrize("blend", BLENDS)
def test_every_token_stream(blend: str, trial: int) -> None:
    for packing, shuffle in itertools.product(("cut", "whole"), SHUFFLES):
        check_token_chain((blend, packing, shuffle), 100 * SEED + trial)


RECORD_SHUFFLES: dict[str, Any] = {"full": True, "block": Blocks(16, 3), "off": False}


def record_settings(blend: str, join: str, group: str, shuffle: str) -> dict[str, Any]:
    first: Any = words("a", 110)
    if join == "join":
        first = JoinedRecords([first, words("caption", 100, seed=9)], missing="skip")
    sources: Any = first if blend == "none" else [first, words("b", 70, seed=1)]
    weights = {"weights": (0.7, 0.3)} if blend == "weights" else {}
    grouped = {"max_tokens": 120} if group == "group" else {}
    shuffled = {"shuffle": RECORD_SHUFFLES[shuffle]}
    return {"batch_samples": 24, "seed": 5, "sources": sources} | weights | grouped | shuffled


@pytest.mark.soak
@pytest.mark.parametrize("workers", [0, 1, 2, 3])
@pytest.mark.parametrize("blend", ["none", "even", "weights"])
def test_every_stream_of_records(blend: str, workers: int) -> None:
    """Blend x join x group x shuffle x workers, with random cuts and rank counts; threads and processes."""
    product = itertools.product(("alone", "join"), ("single", "group"), RECORD_SHUFFLES)
    for number, case in enumerate(product):
        settings, generator = record_settings(blend, *case), random.Random(f"{blend} {workers} {case} {SEED}")
        expected = ledger(Ranks(num_ranks=1, **settings), STEPS)
        kind = "processes" if number % 4 == 0 else "threads"
        for cut in generator.sample(range(STEPS), 4):
            before, after = generator.choice((1, 2, 3)), generator.choice((1, 2, 4, 8))
            ranks = Ranks(num_ranks=before, num_workers=workers, workers=kind, prefetch=3, **settings)
            assert ledger(ranks, cut) == expected[:cut]
            state = json.loads(json.dumps(ranks.state()))
            ranks.close()
            resumed = Ranks(num_ranks=after, num_workers=(workers + 1) % 4, workers="threads", **settings)
            resumed.restore(state)
            assert ledger(resumed, STEPS - cut) == expected[cut:]
            resumed.close()


@pytest.fixture(scope="module")
def mortal() -> Any:
    """A pool of its own: these ranks do not live long."""
    pool = RankPool(max_ranks=2)
    yield pool
    pool.close()


def features(record: Record, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """The length of a record with a random number of its own, and its key."""
    values = next(value for value in record.values() if isinstance(value, np.ndarray))
    inputs = torch.tensor([len(values) / 60, rng.random()], dtype=torch.float64)
    return inputs, torch.tensor(float(str(record["__key__"])) / 110, dtype=torch.float64)


def squared(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
    inputs, target = batch
    return (model(inputs)[:, 0] - target).square().sum(), len(target)


def fit_records(directory: Path) -> list[float]:
    """A run on blended records that threads read ahead; returns its final weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    sources = [words("a", 110), words("b", 70, seed=1)]
    settings: dict[str, Any] = {"num_workers": 2, "workers": "threads", "prefetch": 3}
    loader = open_loader(sources, batch_samples=24, weights=(0.7, 0.3), transform=features, **settings)
    meshwright.fit(
        model,
        loader,
        squared,
        directory=directory,
        device="cpu",
        compute="fp64",
        num_steps=30,
        lr=0.01,
        checkpoint={"every_steps": 1},
    )
    return [float(value) for one in model.parameters() for value in one.flatten()]


def check_killed_records(mortal: RankPool, folder: Path, seed: int, num_kills: int) -> None:
    generator = random.Random(seed)
    expected = mortal.run(fit_records, 2, folder / "whole")
    for _ in range(num_kills):
        with killed_after(mortal, generator.uniform(0.3, 3.0)):
            mortal.run(fit_records, 2, folder / "parts")
    assert mortal.run(fit_records, 2, folder / "parts") == expected


def test_killed_ranks_go_on_with_the_same_records(mortal: RankPool, tmp_path: Path) -> None:
    """SIGKILL of ranks that save every step and read ahead, at random times."""
    check_killed_records(mortal, tmp_path, SEED, num_kills=2)


@pytest.mark.soak
@pytest.mark.parametrize("trial", range(4))
def test_records_of_ranks_that_are_killed_often(mortal: RankPool, tmp_path: Path, trial: int) -> None:
    check_killed_records(mortal, tmp_path, 1000 * SEED + trial, num_kills=6)


def packed_run() -> RunSpec:
    """A blend of packed documents on two ranks, saved after every step."""
    run = tiny_run(
        "gqa",
        parallel=ParallelSpec(dp_shard=2, zero=1),
        optim=OPTIMIZERS["adamw"],
        precision=PrecisionSpec(compute="fp32"),
        schedule=ScheduleSpec(num_steps=12, kind="linear", warmup_steps=2),
        checkpoint=CheckpointSpec(every_steps=1, keep_last=2),
    )
    parts = ({"path": ragged_dataset(40), "weight": 0.7}, {"path": ragged_dataset(25), "weight": 0.3})
    changes = {"path": None, "blend": parts, "packing": "whole"}
    return run.with_(data=DataSpec.model_validate({**run.data.model_dump(), **changes}))


def packed_until(run: RunSpec, directory: Path, fatal_call: int) -> None:
    with dying_at_disk_call(fatal_call):
        train_here(run, directory)


def records_until(directory: Path, fatal_call: int) -> None:
    with dying_at_disk_call(fatal_call):
        fit_records(directory)


def check_kills_in_saves(mortal: RankPool, folder: Path, fatal_calls: list[int]) -> None:
    """Rank 0 of two dies at a change of the disk by a save; both streams go on where the last one ended."""
    run = packed_run()
    attempt(mortal, run, folder / "packed")
    expected = mortal.run(fit_records, 2, folder / "records")
    for number in fatal_calls:
        with killed_after(mortal, 60.0):  # ends the other rank, should it still wait
            mortal.run(packed_until, 2, run, folder / f"packed-{number}", number)
        attempt(mortal, run, folder / f"packed-{number}")
        assert_same_state(folder / f"packed-{number}", folder / "packed")
        with killed_after(mortal, 60.0):
            mortal.run(records_until, 2, folder / f"records-{number}", number)
        assert mortal.run(fit_records, 2, folder / f"records-{number}") == expected


def test_streams_survive_a_kill_in_the_middle_of_a_save(mortal: RankPool, tmp_path: Path) -> None:
    """Packed blends and blended records; one rank of two is killed, at a random change of the disk."""
    check_kills_in_saves(mortal, tmp_path, [random.Random(SEED).randint(4, 40)])


@pytest.mark.soak
@pytest.mark.parametrize("trial", range(3))
def test_streams_survive_kills_in_many_saves(mortal: RankPool, tmp_path: Path, trial: int) -> None:
    check_kills_in_saves(mortal, tmp_path, random.Random(1000 * SEED + trial).sample(range(80), 6))


@pytest.mark.soak
@pytest.mark.parametrize("trial", range(4))
def test_packed_blends_of_killed_ranks(mortal: RankPool, tmp_path: Path, trial: int) -> None:
    run, generator = packed_run(), random.Random(1000 * SEED + trial)
    attempt(mortal, run, tmp_path / "whole")
    for _ in range(4):
        with killed_after(mortal, generator.uniform(0.2, 4.0)):
            attempt(mortal, run, tmp_path / "parts")
    attempt(mortal, run, tmp_path / "parts")
    assert_same_state(tmp_path / "parts", tmp_path / "whole")
