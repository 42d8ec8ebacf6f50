"""Offload on CUDA: the peak falls by the predicted bytes, and not a bit of the result changes."""

import hashlib

import pytest
import torch
from tests.support.equivalence import RTOL, this_world, worst_errors
from tests.support.oracle import reference
from tests.support.run_directories import attempt, last_checkpoint, read_tensors
from tests.support.runs import MODELS, tiny_run

from meshwright.mesh import build_mesh
from meshwright.plan.memory.rank_bytes import host_items
from meshwright.plan.workload.formats import runtime_of, workload_of
from meshwright.plan.workload.layouts import one_layout
from meshwright.spec import (
    AdapterSpec,
    AttentionSpec,
    DataSpec,
    MemorySpec,
    MlpSpec,
    ModelSpec,
    OptimSpec,
    ParallelSpec,
    PrecisionSpec,
    RopeSpec,
    RunSpec,
    ScheduleSpec,
    SyntheticSpec,
)
from meshwright.spec.parameters import num_parameters, parameters
from meshwright.train.build import build_data, build_training, seed_step
from meshwright.train.step import train_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NUM_LAYERS, NUM_STEPS = 12, 3
WIDTH, LENGTH = 1024, 1024
# Layers and tokens enough that the peak lies in a pass, not in the update; a small vocabulary, so that
# blocks and not logits decide it.
MODEL = ModelSpec(
    vocab_size=4096,
    num_layers=NUM_LAYERS,
    width=WIDTH,
    max_positions=LENGTH,
    dropout=0.1,
    attention=AttentionSpec(num_heads=16, num_kv_heads=16, head_width=64),
    mlp=MlpSpec(width=2816),
    rope=RopeSpec(),
)


def _run(offload: str, *, recompute: str = "none", compute: str = "fp32") -> RunSpec:
    return RunSpec(
        seed=1,
        device="cuda",
        deterministic=True,
        model=MODEL,
        precision=PrecisionSpec(compute=compute),
        memory=MemorySpec(offload=offload, recompute=recompute),
        optim=OptimSpec(kind="adamw"),
        schedule=ScheduleSpec(num_steps=10),
        data=DataSpec(
            synthetic=SyntheticSpec(),
            sequence_length=LENGTH,
            batch_sequences=8,
            microbatch_sequences=4,
        ),
    )


def _train(run: RunSpec) -> dict[str, object]:
    """Three steps: losses, a digest of the weights, the peak of the last two, and the counters."""
    mesh = build_mesh(run.parallel, this_world())
    training, batches = build_training(run, mesh), build_data(run, mesh)
    losses = []
    for step in range(NUM_STEPS):
        if step == 1:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        seed_step(run.seed, step)
        losses.append(float(train_step(training, next(batches), learning_rate=1e-3).loss))
    # As asked for: the allocator leaves up to 1 MiB behind a tensor that it cannot use otherwise.
    peak_bytes = torch.cuda.memory_stats()["requested_bytes.all.peak"]
    batches.close()
    with training.weights.all_on_device():
        weights = b"".join(one.shard.detach().cpu().numpy().tobytes() for one in training.program.shards)
    counters = training.weights.link.counters
    return {
        "losses": losses,
        "weights": hashlib.sha256(weights).hexdigest(),
        "peak_bytes": peak_bytes,
        "sent_bytes": counters.sent_bytes,
        "host_bytes": counters.peak_host_bytes,
    }


def _pair(nccl_ranks, offload: str, **choices: str) -> tuple[dict, dict]:
    nccl_ranks.restart()  # a fresh process: no memory of another case
    plain = nccl_ranks.run(_train, 1, _run("", **choices))[0]
    nccl_ranks.restart()
    moved = nccl_ranks.run(_train, 1, _run(offload, **choices))[0]
    assert plain["losses"] == moved["losses"]
    assert plain["weights"] == moved["weights"]
    print(
        f"{offload} {choices}: peak {plain['peak_bytes'] / 2**20:.0f} MiB, then "
        f"{moved['peak_bytes'] / 2**20:.0f} MiB and on the host {moved['host_bytes'] / 2**20:.0f} MiB"
    )
    return plain, moved


def _predicted(offload: str, **choices: str) -> dict[str, float]:
    run = _run(offload, **choices)
    data = run.data
    at = one_layout(
        run.parallel,
        run.memory,
        microbatch_sequences=data.microbatch_sequences,
        num_microbatches=run.accumulation,
    )
    return {
        name: float(size.max()) for name, size in host_items(workload_of(run), at, runtime_of(run)).items()
    }


def test_the_peak_falls_by_the_optimizer_states(nccl_ranks):
    plain, moved = _pair(nccl_ranks, "optimizer")
    expected = 8 * num_parameters(MODEL)
    assert _predicted("optimizer")["optimizer"] == moved["host_bytes"] == expected
    # Counts of updates stay; the rest of the peak is the same.
    assert plain["peak_bytes"] - moved["peak_bytes"] == pytest.approx(expected, rel=0.005)


def test_the_peak_falls_by_the_weights_of_all_but_two_blocks(nccl_ranks):
    plain, moved = _pair(nccl_ranks, "parameters")
    blocks = 4 * sum(one.num_elements for one in parameters(MODEL) if one.name.startswith("blocks."))
    assert _predicted("parameters")["parameters"] == pytest.approx(blocks) == moved["host_bytes"]
    # Where the peak lies, one or two blocks are here.
    fall = plain["peak_bytes"] - moved["peak_bytes"]
    assert blocks * (1 - 2.1 / NUM_LAYERS) <= fall <= blocks


@pytest.mark.parametrize(
    ("recompute", "compute"), [("none", "fp32"), ("none", "bf16"), ("selective", "bf16"), ("full", "bf16")]
)
def test_the_peak_falls_by_the_activations_of_all_but_two_blocks(nccl_ranks, recompute, compute):
    choices = {"recompute": recompute, "compute": compute}
    plain, moved = _pair(nccl_ranks, "activations", **choices)
    fall = plain["peak_bytes"] - moved["peak_bytes"]
    # The peak may move to where three blocks meet: one in use, one that comes, one whose gradients wait.
    assert moved["host_bytes"] * (1 - 3.1 / NUM_LAYERS) <= fall <= 1.01 * moved["host_bytes"]
    predicted = _predicted("activations", **choices)["activations"]
    # The formula rounds what kernels save to the tensors that matter.
    assert moved["host_bytes"] == pytest.approx(predicted, rel=0.25)


def test_the_peak_falls_by_the_frozen_token_table(nccl_ranks):
    adapter = AdapterSpec(rank=4, alpha=8, base="bf16")
    results = []
    for offload in ("", "embedding"):
        nccl_ranks.restart()
        run = _run(offload, recompute="full", compute="bf16").with_(adapter=adapter)
        results.append(nccl_ranks.run(_train, 1, run)[0])
    plain, moved = results
    assert plain["losses"] == moved["losses"]
    assert plain["weights"] == moved["weights"]
    table = 2 * MODEL.vocab_size * WIDTH
    assert moved["host_bytes"] == table
    assert plain["peak_bytes"] - moved["peak_bytes"] == pytest.approx(table, rel=0.01)


def test_everything_at_once(nccl_ranks):
    plain, moved = _pair(nccl_ranks, "optimizer,parameters,activations", recompute="full", compute="bf16")
    assert moved["peak_bytes"] < 0.6 * plain["peak_bytes"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (ParallelSpec(), ParallelSpec(dp_shard=2, zero=3)),
        (ParallelSpec(dp_shard=2, zero=1), ParallelSpec(tp=2)),
    ],
    ids=("single_to_zero_3", "zero_1_to_tp"),
)
def test_states_on_the_host_are_saved_and_restored(nccl_ranks, tmp_path, before, after):
    run = tiny_run(MODELS["gqa"], optim="adamw", device="cuda")
    memory = MemorySpec(offload="optimizer")
    attempt(nccl_ranks, run.with_(parallel=before, memory=memory), tmp_path, stop_after=2)
    attempt(nccl_ranks, run.with_(parallel=after, memory=memory), tmp_path)
    expected = reference(run, num_steps=run.schedule.num_steps)
    tensors = read_tensors(last_checkpoint(tmp_path))
    for part, known in (("model.", expected.weights), ("optim.", expected.optimizer)):
        found = {name.removeprefix(part): value for name, value in tensors.items() if name.startswith(part)}
        assert max(worst_errors(found, known).values()) <= RTOL
