"""Batches that grow and the noise scale: the same on any mesh."""

import pytest
import torch
from tests.support.equivalence import RTOL, assert_same_training, run_case, worst_errors
from tests.support.oracle import Sequences, _optimizer, reference, reference_model, reference_rate, token_loss
from tests.support.run_directories import assert_same_state, attempt, last_checkpoint, read_tensors
from tests.support.runs import MODELS, OPTIMIZERS, tiny_run
from torch import nn

from meshwright.observe.metrics import read_metrics
from meshwright.spec import (
    CheckpointSpec,
    LrScalingSpec,
    NoiseScaleSpec,
    ObserveSpec,
    ParallelSpec,
    PrecisionSpec,
    RunSpec,
)

RAMP = ((1, 4), (2, 6))
LAYOUTS = {
    "single": ParallelSpec(),
    "zero_1": ParallelSpec(dp_shard=2, zero=1),
    "zero_3": ParallelSpec(dp_shard=2, zero=3),
    "tp": ParallelSpec(tp=2),
    "pp": ParallelSpec(pp=2),
    "cp": ParallelSpec(cp=2),
    "ep": ParallelSpec(dp_shard=2, zero=1, ep=2),
}


@pytest.mark.parametrize("layout", (pytest.param("single", marks=pytest.mark.soak), "zero_3", "pp"))
def test_a_ramp_equals_one_device(ranks, layout):
    """Batches of 4, 6 and 8 sequences: a pipeline has another schedule for each."""
    run = tiny_run("tied", parallel=LAYOUTS[layout], optim="adamw", ramp=RAMP)
    results = run_case(ranks, run)
    assert [len(ids) for ids in results[0].sample_ids] == [4, 6, 8]
    assert_same_training(results, reference(run))


@pytest.mark.parametrize(("before", "after"), [("pp", "zero_1"), ("zero_3", "single")])
def test_resumes_inside_a_ramp_on_another_mesh(ranks, tmp_path, before, after):
    """Sample for sample; the rate follows the batch where a rule says so."""
    scaling = LrScalingSpec(rule="linear", reference_batch_tokens=8 * 16)
    optim = OPTIMIZERS["adamw"]
    run = tiny_run("gqa", optim=optim, ramp=((3, 4), (5, 6)))
    scaled = run.with_(optim=optim.with_(lr_scaling=scaling))
    first = attempt(ranks, scaled.with_(parallel=LAYOUTS[before]), tmp_path, stop_after=2)
    second = attempt(ranks, scaled.with_(parallel=LAYOUTS[after]), tmp_path)
    sequences = Sequences(run)
    expected = [tuple(sequences.batch_ids(run, step)) for step in range(6)]
    assert first.sample_ids + second.sample_ids == expected
    assert [len(ids) for ids in expected] == [4, 4, 4, 6, 6, 8]
    rows = read_metrics(tmp_path)
    assert [row["step_tokens"] for row in rows] == [16 * len(ids) for ids in expected]
    rates = [reference_rate(run, step) * len(ids) / 8 for step, ids in enumerate(expected)]
    assert [row["lr"] for row in rows] == pytest.approx(rates, rel=1e-12)


def noise_run(layout: str, **changes) -> RunSpec:
    observe = ObserveSpec(noise_scale=NoiseScaleSpec(every_steps=1))
    return tiny_run("tied", parallel=LAYOUTS[layout], observe=observe, **changes)


def reference_noise(run: RunSpec, num_steps: int) -> list[tuple[float, float]]:
    """(signal, noise) of each step, from the gradients of the first half and of the full batch."""
    model, sequences = reference_model(run), Sequences(run)
    named = dict(model.named_parameters())
    optimizer = _optimizer(run, named)
    found = []
    for step in range(num_steps):
        ids = sequences.batch_ids(run, step)
        squares, tokens = [], []
        for part in (ids[: len(ids) // 2], ids):
            optimizer.zero_grad()
            rows = sequences.rows(part)
            token_loss(model, rows).backward()
            squares.append(sum(float(p.grad.square().sum()) for p in named.values() if p.grad is not None))
            tokens.append(int((rows["targets"] >= 0).sum()))
        noise = (squares[0] - squares[1]) / (1 / tokens[0] - 1 / tokens[1])
        signal = (tokens[1] * squares[1] - tokens[0] * squares[0]) / (tokens[1] - tokens[0])
        found.append((signal, noise))
        nn.utils.clip_grad_norm_(named.values(), run.optim.max_grad_norm or torch.inf)
        for group in optimizer.param_groups:
            group["lr"] = reference_rate(run, step) * group["lr_factor"]
        optimizer.step()
    return found


@pytest.mark.parametrize(
    ("layout", "microbatch_sequences"),
    [
        *(("zero_1", 4), ("pp", 2), ("cp", 4)),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in (("zero_3", 1), ("tp", 2))),
    ],
)
def test_the_noise_scale_is_that_of_one_device(ranks, tmp_path, layout, microbatch_sequences):
    """The half is by micro-batches, or by ranks where each has one (zero_1 here)."""
    run = noise_run(layout, microbatch_sequences=microbatch_sequences)
    attempt(ranks, run, tmp_path)
    rows = read_metrics(tmp_path)
    expected = reference_noise(run, len(rows))
    for row, (signal, noise) in zip(rows, expected, strict=True):
        assert row["gradient_signal"] == pytest.approx(signal, rel=100 * RTOL)  # differences of squares
        assert row["gradient_noise"] == pytest.approx(noise, rel=100 * RTOL)


def test_measuring_changes_nothing(ranks, tmp_path):
    """Dropout, balance biases and records of the routers are as without; the average goes on after a stop."""
    model = MODELS["moe_shared"].with_(dropout=0.2)
    plain = tiny_run(
        model,
        parallel=LAYOUTS["ep"],
        optim="adamw",
        precision=PrecisionSpec(),
        deterministic=True,
        checkpoint=CheckpointSpec(every_steps=2),
        microbatch_sequences=2,
    )
    observe = ObserveSpec(noise_scale=NoiseScaleSpec(every_steps=2))
    attempt(ranks, plain, tmp_path / "plain")
    attempt(ranks, plain.with_(observe=observe), tmp_path / "whole")
    attempt(ranks, plain.with_(observe=observe), tmp_path / "parts", stop_after=3)
    attempt(ranks, plain.with_(observe=observe), tmp_path / "parts")
    assert_same_state(tmp_path / "parts", tmp_path / "whole")
    ours, theirs = (read_tensors(last_checkpoint(tmp_path / name)) for name in ("whole", "plain"))
    assert not max(worst_errors(ours, theirs).values())
    for key in ("loss", "grad_norm", "expert_load_max", "aux_loss"):
        histories = [[row[key] for row in read_metrics(tmp_path / name)] for name in ("plain", "whole")]
        assert histories[0] == histories[1]
    measured = [row for row in read_metrics(tmp_path / "whole") if "gradient_noise" in row]
    assert [row["step"] for row in measured] == [2, 4, 6]
