"""What a run records, also when it fails."""

import json
import math
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from tests.support.shrunk_families import shrunk_family

from meshwright.data.corpus import generated_tokens, unigram_entropy
from meshwright.errors import RunError
from meshwright.mesh import World
from meshwright.observe.metrics import read_metrics
from meshwright.observe.summary import read_summary
from meshwright.spec import RunSpec, SyntheticSpec
from meshwright.train.loop import train
from meshwright.train.messages import NOT_COMPILED


def run_of(**changes: Any) -> RunSpec:
    values: dict[str, Any] = {
        "device": "cpu",
        "model": shrunk_family("llama-3.1-8b", vocab_size=257, num_layers=1).model_dump(),
        "schedule": {"num_steps": 3},
        "data": {"synthetic": {"num_documents": 4}, "sequence_length": 16, "batch_sequences": 4},
    }
    return RunSpec.model_validate({**values, **changes})


COMPILE = torch.compile


def trained(run: RunSpec, run_dir: Path) -> Any:
    """On every rank: train; what a failure raised is returned, so that the ranks end in order."""
    rank = dist.get_rank()
    world = World(rank=rank, local_rank=rank, num_ranks=dist.get_world_size(), device=torch.device("cpu"))
    try:
        return train(run, world, run_dir).state
    except RunError as error:
        return error


def test_summary_of_a_finished_run_knows_its_corpus(ranks, tmp_path: Path):
    ranks.run(trained, 1, run_of(), tmp_path)
    summary = read_summary(tmp_path)
    tokens = generated_tokens(SyntheticSpec(num_documents=4)).tokens
    assert summary["outcome"] == "finished" and summary["final_step"] == 3
    assert summary["unigram_entropy"] == pytest.approx(unigram_entropy(tokens), rel=1e-12)
    assert all("expert_load_max" not in row and "loss_scale" not in row for row in read_metrics(tmp_path))


def _by_operators(forward: Any, **options: Any) -> Any:
    return COMPILE(forward, **{**options, "backend": "aot_eager"})


def _skipping(forward: Any, **options: Any) -> Any:
    return torch.compiler.disable(forward)


def _trained_compiled(run: RunSpec, run_dir: Path, compiler: Any) -> Any:
    with patch.object(torch, "compile", compiler):
        return trained(run, run_dir)


@pytest.mark.parametrize("compiler", [_by_operators, _skipping])
def test_a_compiler_that_skips_every_block_is_reported(ranks, tmp_path: Path, compiler):
    model = shrunk_family("qwen3-30b-a3b", vocab_size=257, num_layers=1).model_dump()
    run = run_of(model=model, compile=True, memory={"recompute": "full"}, schedule={"num_steps": 1})
    ranks.run(_trained_compiled, 1, run, tmp_path, compiler)
    events = [json.loads(line) for line in (tmp_path / "events-0.jsonl").read_text().splitlines()]
    warnings = [event["text"] for event in events if event["kind"] == "warning"]
    assert (NOT_COMPILED in warnings) == (compiler is _skipping)


def test_a_loss_that_is_not_finite_is_recorded(ranks, tmp_path: Path):
    # A rate of 1e30 throws the weights so far that the second step overflows.
    run = run_of(optim={"lr": 1e30, "max_grad_norm": None, "weight_decay": 0})
    errors = ranks.run(trained, 2, run.with_(parallel={"dp_shard": 2, "zero": 1}), tmp_path)
    assert all(isinstance(error, RunError) and "not finite at step" in error.fact for error in errors)
    rows = read_metrics(tmp_path)
    assert not math.isfinite(rows[-1]["loss"]) and rows[-1]["step"] == len(rows)
    summary = read_summary(tmp_path)
    assert summary["outcome"] == "failed" and summary["final_step"] == len(rows)
    events = [json.loads(line) for line in (tmp_path / "events-0.jsonl").read_text().splitlines()]
    assert events[-1]["kind"] == "failure" and "not finite at step" in events[-1]["text"]


def test_overflows_are_counted(ranks, tmp_path: Path):
    # The scale starts so high that the first gradients overflow; it backs off until they do not.
    scale = {"initial": 1e38, "backoff_factor": 0.001}
    run = run_of(precision={"compute": "fp16", "loss_scale": scale})
    [state] = ranks.run(trained, 1, run, tmp_path)
    rows = read_metrics(tmp_path)
    assert state.num_skipped > 0 and read_summary(tmp_path)["num_skipped"] == state.num_skipped
    assert rows[0]["skipped"] is True and rows[-1]["skipped"] is False
    assert rows[-1]["loss_scale"] < 1e38


def moe_run(parallel: dict[str, int], rate: float) -> RunSpec:
    model = shrunk_family("deepseek-v3", vocab_size=257)
    assert model.moe is not None
    moe = model.moe.with_(balance_bias_rate=rate, aux_loss=0.01)
    return run_of(model=model.with_(moe=moe).model_dump(), parallel=parallel, precision={"compute": "fp64"})


def test_expert_load_does_not_depend_on_the_mesh(ranks, tmp_path: Path):
    meshes = {"one": {}, "two": {"dp_replicate": 2}, "ep": {"dp_shard": 2, "ep": 2}}
    figures = {}
    for name, parallel in meshes.items():
        run = moe_run(parallel, 0.01)
        ranks.run(trained, run.parallel.num_ranks, run, tmp_path / name)
        rows = read_metrics(tmp_path / name)
        keys = ("expert_load_max", "expert_load_min", "aux_loss", "loss")
        figures[name] = torch.tensor([[row[key] for key in keys] for row in rows], dtype=torch.float64)
    # fp64, so only sums in another order: choices of experts and the bias they move stay the same.
    assert torch.allclose(figures["two"], figures["one"], rtol=1e-9)
    assert torch.allclose(figures["ep"], figures["one"], rtol=1e-9)
    most, least, aux, _ = figures["one"].T
    assert (most > 1).all() and (least < 1).all() and (aux >= 0.9).all()


def biases(run: RunSpec, run_dir: Path) -> list[list[float]]:
    from meshwright.mesh import build_mesh
    from meshwright.train.build import build_data, build_training
    from meshwright.train.step import train_step

    del run_dir
    rank = dist.get_rank()
    world = World(rank=rank, local_rank=rank, num_ranks=dist.get_world_size(), device=torch.device("cpu"))
    mesh = build_mesh(run.parallel, world)
    training, batches = build_training(run, mesh), build_data(run, mesh)
    for _ in range(2):
        train_step(training, next(batches), learning_rate=1e-3)
    batches.close()
    stage = training.program.stages[0]
    return [buffer.tolist() for name, buffer in stage.named_buffers() if name.endswith("balance_bias")]


def test_balance_bias_moves_alike_on_all_ranks(ranks, tmp_path: Path):
    [alone] = ranks.run(biases, 1, moe_run({}, 0.01), tmp_path)
    together = ranks.run(biases, 2, moe_run({"dp_replicate": 2}, 0.01), tmp_path)
    assert together == [alone, alone]
    moved = {round(abs(value), 6) for bias in alone for value in bias}
    assert moved <= {0.0, 0.01, 0.02} and moved != {0.0}


def test_balance_bias_stays_without_a_rate(ranks, tmp_path: Path):
    [alone] = ranks.run(biases, 1, moe_run({}, 0.0), tmp_path)
    assert not any(value for bias in alone for value in bias)
