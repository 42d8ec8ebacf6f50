"""The oracle and the recorder, tested themselves."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.support.equivalence import all_tensor_bytes, this_world, worst_errors
from tests.support.expected_traffic import expected_parameter_bytes, most_optimizer_bytes
from tests.support.oracle import (
    IGNORED,
    Sequences,
    loss_of_one_document,
    reference,
    reference_model,
    token_loss,
)
from tests.support.recorded_traffic import Recorder, named_calls
from tests.support.runs import MODELS, OPTIMIZERS, SEQUENCE_LENGTH, tiny_run

from meshwright.data.sources import TokenFile
from meshwright.mesh import build_mesh
from meshwright.ops.collectives import all_gather
from meshwright.spec import ParallelSpec, RunSpec
from meshwright.train.build import build_data, build_training
from meshwright.train.step import train_step


@pytest.mark.parametrize("model", ("gqa", "gpt", "mla", "moe"))
def test_a_packed_sequence_is_its_documents_one_by_one(model):
    """No attention, position or loss term crosses a document boundary."""
    run = tiny_run(model)
    sequences, decoder = Sequences(run), reference_model(run)
    rows = sequences.rows([4])
    document = rows["documents"][0].numpy()
    tokens = rows["tokens"][0].numpy()
    assert len(set(document.tolist())) > 2
    total, count = 0.0, 0
    for number in sorted(set(document.tolist())):
        inside = tokens[document == number]
        if number == document[-1] and rows["targets"][0, -1] != IGNORED:
            inside = np.append(inside, rows["targets"][0, -1])
        if len(inside) > 1:
            part, targets = loss_of_one_document(decoder, inside)
            total, count = total + part, count + targets
    assert count == int((rows["targets"] != IGNORED).sum())
    assert float(token_loss(decoder, rows).detach()) == pytest.approx(total / count, rel=1e-12)


def test_targets_are_the_next_tokens_of_the_same_document():
    run = tiny_run()
    source = TokenFile.open(Path(str(run.data.path)))
    sequences = Sequences(run)
    rows = sequences.rows(list(range(sequences.num_sequences)))
    ends = set(source.document_ends.tolist())
    for place, target in enumerate(rows["targets"].flatten().tolist()):
        is_end = place + 1 in ends
        assert target == (IGNORED if is_end else int(source.tokens[place + 1]))


def test_data_are_ragged():
    """Documents of one token and longer than a sequence, and batches with unlike numbers of targets."""
    run = tiny_run()
    sequences = Sequences(run)
    lengths = np.bincount(sequences.document)
    assert lengths.min() <= 2 and lengths.max() > 2 * SEQUENCE_LENGTH
    counts = {
        int((sequences.rows(sequences.batch_ids(run, step))["targets"] != IGNORED).sum()) for step in range(3)
    }
    assert len(counts) > 1


def test_some_steps_are_clipped_and_some_are_not():
    norms = reference(tiny_run("gqa", optim="sgd")).grad_norms
    limit = OPTIMIZERS["sgd"].max_grad_norm
    assert (limit is not None and min(norms) < limit < max(norms)) or max(norms) > limit


def test_an_error_is_seen_in_its_own_scale():
    expected = {"large": torch.tensor([1.0, 100.0]), "small": torch.tensor([1e-3])}
    errors = worst_errors({"large": torch.tensor([1.0, 101.0]), "small": torch.tensor([2e-3])}, expected)
    assert errors["large"] == pytest.approx(0.01)
    assert errors["small"] == pytest.approx(0.1)  # 1e-3 / (1e-4 of the largest)
    assert worst_errors({}, expected) == {"large": torch.inf, "small": torch.inf}


def test_not_a_number_is_an_error():
    assert worst_errors({"a": torch.tensor([torch.nan])}, {"a": torch.ones(1)}) == {"a": torch.inf}


def _communicate() -> dict[tuple[str, str, int], int]:
    mesh = build_mesh(ParallelSpec(dp_replicate=2, tp=2), this_world())
    x = torch.ones(4, 3, dtype=torch.float64, requires_grad=True)
    with Recorder() as recorder:
        all_gather(x, 0, mesh.group("tp")).sum().backward()
        dist.all_reduce(torch.ones(5), group=mesh.group("dp_replicate"))
        dist.all_reduce(torch.ones(1, dtype=torch.int64))
        dist.all_reduce(torch.ones(7), group=mesh.group("pp"))  # one rank: moves nothing
    return dict(named_calls(recorder.calls, mesh))


def test_the_recorder_sees_forward_and_backward(ranks):
    for seen in ranks.run(_communicate, 4):
        assert seen == {
            ("all_gather", "tp", 8 * 3 * 8): 1,
            ("reduce_scatter", "tp", 8 * 3 * 8): 1,
            ("all_reduce", "dp_replicate", 5 * 4): 1,
            ("all_reduce", "dp_replicate+tp", 8): 1,
        }


def _tensor_bytes_between_steps(run: RunSpec) -> int:
    """What this process holds after an update, besides what it held before the model was built."""
    before = all_tensor_bytes()
    mesh = build_mesh(run.parallel, this_world())
    training, batches = build_training(run, mesh), build_data(run, mesh)
    for _ in range(2):
        train_step(training, next(batches), learning_rate=0.1)
    held = all_tensor_bytes() - before
    batches.close()
    return held


@pytest.mark.parametrize("stage", (0, 1, 2, 3))
def test_nothing_large_hides(ranks, stage):
    """Between steps a rank holds parameters and states of its ZeRO stage, and a batch or three."""
    parallel = ParallelSpec(dp_shard=4, zero=stage) if stage else ParallelSpec(dp_replicate=4)
    model = MODELS["gqa"].with_(width=64, mlp={"width": 256})
    run = tiny_run(model, parallel=parallel, optim="adamw")
    state = expected_parameter_bytes(run, 0) + most_optimizer_bytes(run, 0, 2)
    for held in ranks.run(_tensor_bytes_between_steps, 4, run):
        assert 0.95 * state < held < 1.15 * state
