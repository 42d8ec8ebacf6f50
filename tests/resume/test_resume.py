"""A run that was stopped and resumed is the run that was not."""

import functools
import json
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
from tests.support.equivalence import RTOL, worst_errors
from tests.support.oracle import Sequences, reference
from tests.support.run_directories import Attempt, assert_same_state, attempt, last_checkpoint, read_tensors
from tests.support.runs import MODELS, OPTIMIZERS, few_microbatches, tiny_run
from tests.support.soak import soak

from meshwright.observe.metrics import read_metrics
from meshwright.spec import CheckpointSpec, ParallelSpec, PrecisionSpec, RunSpec

NUM_STEPS = 6
WITH_DROPOUT = MODELS["moe"].with_(dropout=0.2)
LAYOUTS = {
    "one_rank": ParallelSpec(),
    "zero_0": ParallelSpec(dp_replicate=2),
    **{f"zero_{stage}": ParallelSpec(dp_shard=2, zero=stage) for stage in (1, 2, 3)},
}


def bitwise_run(parallel: ParallelSpec, compute: str = "fp32") -> RunSpec:
    """Everything that has state: dropout, momenta, averages, the loss scale of fp16."""
    precision = {"compute": compute, "loss_scale": {"initial": 2.0**24, "growth_steps": 2}}
    if compute != "fp16":
        precision = {"compute": compute}
    return tiny_run(
        WITH_DROPOUT,
        parallel=parallel,
        optim=OPTIMIZERS["adamw"].with_(ema_decay=0.5),
        deterministic=True,
        precision=PrecisionSpec.model_validate(precision),
        checkpoint=CheckpointSpec(every_steps=2),
        microbatch_sequences=few_microbatches(parallel),
    )


@pytest.fixture(scope="module")
def uninterrupted(ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Attempt]]:
    """Layout -> the directory and the attempt of the run that is not stopped, trained once."""

    @functools.cache
    def train(layout: str) -> tuple[Path, Attempt]:
        run_dir = tmp_path_factory.mktemp(layout)
        return run_dir, attempt(ranks, bitwise_run(LAYOUTS[layout]), run_dir)

    return train


def history(run_dir: Path) -> list[tuple[object, ...]]:
    """What metrics.jsonl says of each step, without times."""
    kept = ("step", "loss", "grad_norm", "lr", "tokens")
    return [tuple(row[key] for key in kept) for row in read_metrics(run_dir)]


def named(parallel: ParallelSpec) -> str:
    axes = parallel.model_dump(exclude_defaults=True).items()
    return "-".join(f"{key}{value}" for key, value in axes) or "one"


STOPPED = [(1, "one_rank"), (3, "one_rank"), (1, "zero_0"), (3, "zero_1"), (1, "zero_3")]
MORE_STOPPED = [case for case in product((1, 3), LAYOUTS) if case not in STOPPED]


@pytest.mark.parametrize(
    ("stop_after", "layout"),
    [*STOPPED, *(soak(*case) for case in MORE_STOPPED)],
    ids=[f"{stop_after}-{layout}" for stop_after, layout in (*STOPPED, *MORE_STOPPED)],
)
def test_stopped_and_resumed_equals_uninterrupted(ranks, tmp_path, uninterrupted, layout, stop_after):
    run = bitwise_run(LAYOUTS[layout])
    whole_dir, whole = uninterrupted(layout)
    first = attempt(ranks, run, tmp_path / "parts", stop_after=stop_after)
    assert (first.kind, first.step) == ("interrupted", stop_after)
    second = attempt(ranks, run, tmp_path / "parts")
    assert (second.kind, second.step) == ("finished", NUM_STEPS)
    assert first.sample_ids + second.sample_ids == whole.sample_ids
    assert history(tmp_path / "parts") == history(whole_dir)
    assert_same_state(tmp_path / "parts", whole_dir)
    kinds = {name.split(".")[0] for name in read_tensors(last_checkpoint(tmp_path / "parts"))}
    assert kinds == {"model", "optim", "ema"}


@pytest.mark.parametrize("layout", ("one_rank", soak("zero_1"), soak("zero_3")))
def test_the_loss_scale_resumes(ranks, tmp_path, layout):
    """It starts far too high, so the first batches are skipped; they count as used, not as steps."""
    run = bitwise_run(LAYOUTS[layout], "fp16")
    whole = attempt(ranks, run, tmp_path / "whole")
    skipped = len(whole.sample_ids) - NUM_STEPS
    assert skipped > 3
    first = attempt(ranks, run, tmp_path / "parts", stop_after=skipped + 2)
    second = attempt(ranks, run, tmp_path / "parts")
    assert 0 < first.step < NUM_STEPS
    assert first.sample_ids + second.sample_ids == whole.sample_ids
    assert history(tmp_path / "parts") == history(tmp_path / "whole")
    assert_same_state(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (ParallelSpec(), ParallelSpec(dp_shard=4, zero=3)),
        soak(ParallelSpec(dp_shard=4, zero=3), ParallelSpec()),
        soak(ParallelSpec(dp_shard=2, zero=1), ParallelSpec(dp_replicate=2, dp_shard=2, zero=2)),
        soak(ParallelSpec(dp_shard=4, zero=2), ParallelSpec(dp_replicate=2)),
        soak(ParallelSpec(dp_shard=2, zero=1, tp=2), ParallelSpec(dp_shard=2, zero=3, tp=2)),
        (ParallelSpec(tp=2), ParallelSpec(pp=2)),
        (ParallelSpec(pp=2, schedule="zbv", virtual_stages=2), ParallelSpec(cp=2, zero=1)),
        soak(ParallelSpec(dp_shard=2, zero=1, ep=2), ParallelSpec(pp=2, tp=2)),
        (ParallelSpec(pp=2, dp_shard=2, zero=3), ParallelSpec(dp_shard=4, zero=1, ep=2)),
    ],
    ids=named,
)
def test_resumes_on_another_mesh(ranks, tmp_path, before, after):
    """Sample for sample, and weights as if nothing had happened."""
    model = MODELS["moe"].with_(num_layers=4, tied_head=True)
    run = tiny_run(model, optim=OPTIMIZERS["adamw"].with_(ema_decay=0.5), microbatch_sequences=2)
    first = attempt(ranks, run.with_(parallel=before), tmp_path, stop_after=2)
    second = attempt(ranks, run.with_(parallel=after), tmp_path)
    assert (first.step, second.step) == (2, NUM_STEPS)
    whole = reference(run, num_steps=NUM_STEPS)
    tensors = read_tensors(last_checkpoint(tmp_path))
    for kind, expected in (("model", whole.weights), ("optim", whole.optimizer), ("ema", whole.ema)):
        found = {
            name.removeprefix(f"{kind}."): value
            for name, value in tensors.items()
            if name.startswith(f"{kind}.")
        }
        errors = worst_errors(found, expected)
        assert max(errors.values()) <= RTOL, max(errors, key=lambda name: errors[name])
    # Each rank of a mesh sees the ids of the whole batch, so the two attempts are one stream.
    ids = [sample for batch in first.sample_ids + second.sample_ids for sample in batch]
    assert ids == [sample for batch in _sample_stream(run) for sample in batch]


def _sample_stream(run: RunSpec) -> list[list[int]]:
    sequences = Sequences(run)
    return [sequences.batch_ids(run, step) for step in range(NUM_STEPS)]


def test_metrics_are_one_clean_history(ranks, tmp_path):
    """Steps that a stopped attempt had recorded, but not saved, are recorded once."""
    run = bitwise_run(ParallelSpec()).with_(checkpoint=CheckpointSpec(every_steps=2))
    attempt(ranks, run, tmp_path, stop_after=3)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    ahead = json.dumps({**json.loads(lines[-1]), "step": 4})
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, ahead, '{"step": 5, "lo']))
    attempt(ranks, run, tmp_path)
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, NUM_STEPS + 1))


def test_a_finished_run_is_left_as_it_is(ranks, tmp_path):
    run = bitwise_run(ParallelSpec())
    attempt(ranks, run, tmp_path)
    before = {path: path.read_bytes() for path in last_checkpoint(tmp_path).iterdir()}
    again = attempt(ranks, run, tmp_path)
    assert (again.kind, again.step, again.sample_ids) == ("finished", NUM_STEPS, [])
    assert {path: path.read_bytes() for path in last_checkpoint(tmp_path).iterdir()} == before
