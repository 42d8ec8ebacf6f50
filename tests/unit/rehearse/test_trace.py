"""The trace against what really happens: torch's own CPU allocator, and a later step."""

import functools
import gc
import weakref

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from meshwright.errors import MeshError, SpecError
from meshwright.rehearse.categories import step_peak
from meshwright.rehearse.measure import fill_random
from meshwright.rehearse.trace import Trace, trace_rank, zero_batch
from meshwright.rehearse.world import fake_world
from meshwright.spec import (
    AttentionSpec,
    DataSpec,
    LossScaleSpec,
    MemorySpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    OptimSpec,
    ParallelSpec,
    PrecisionSpec,
    RopeSpec,
    RunSpec,
    ScheduleSpec,
    SyntheticSpec,
)
from meshwright.train.build import build_training
from meshwright.train.step import train_step

MODEL = ModelSpec(
    vocab_size=512,
    num_layers=4,
    width=128,
    max_positions=256,
    attention=AttentionSpec(num_heads=4, num_kv_heads=2, head_width=32),
    mlp=MlpSpec(width=256),
    rope=RopeSpec(),
)


def small_run(
    parallel: dict,
    *,
    num_layers: int = 4,
    microbatches: int = 2,
    recompute: str = "none",
    compute: str = "fp32",
) -> RunSpec:
    """A run of few operators, since a trace's time goes with them."""
    layout = ParallelSpec(**parallel)
    return RunSpec(
        device="cpu",
        model=MODEL.with_(num_layers=num_layers),
        parallel=layout,
        precision=PrecisionSpec(compute=compute),
        memory=MemorySpec(recompute=recompute),
        # Its update allocates alike on the CPU and on CUDA; AdamW has other kernels on each.
        optim=OptimSpec(kind="sgd", beta1=0.9, max_grad_norm=1.0),
        schedule=ScheduleSpec(num_steps=4),
        data=DataSpec(
            synthetic=SyntheticSpec(),
            sequence_length=128,
            batch_sequences=microbatches * layout.dp,
            documents="joined",
        ),
    )


# Layout, layers, micro-batches.
LAYOUTS = {
    "one": ({}, 2, 3),
    "zero_1": ({"dp_shard": 4, "zero": 1}, 2, 2),
    "zero_3": ({"dp_shard": 4, "zero": 3}, 2, 3),
    "tp": ({"tp": 2}, 2, 2),
    "cp_ring": ({"cp": 2, "cp_kind": "ring"}, 2, 1),
    "pp_interleaved": ({"pp": 2, "schedule": "interleaved_1f1b", "virtual_stages": 2}, 4, 2),
    "pp_zero_3": ({"pp": 2, "dp_shard": 2, "zero": 3}, 4, 4),
}


def layout_run(name: str, **how: str) -> RunSpec:
    parallel, num_layers, microbatches = LAYOUTS[name]
    return small_run(parallel, num_layers=num_layers, microbatches=microbatches, **how)


@functools.cache
def traced(run: RunSpec, **how) -> Trace:
    """Traces that several tests look at."""
    return trace_rank(run, 0, **how)


def _real_rise(run: RunSpec) -> int:
    """Bytes that torch's CPU allocator hands out in the second step beyond those held before it."""
    with fake_world(run.parallel, 0, torch.device("cpu")) as mesh:
        training = build_training(run, mesh, fill=fill_random)
        batch = zero_batch(run)
        train_step(training, batch, learning_rate=1e-3)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            train_step(training, batch, learning_rate=1e-3)
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    total = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes()
        highest = max(highest, total)
    return highest


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_log_is_what_the_allocator_hands_out_to_the_byte(name, monkeypatch):
    run = layout_run(name)
    # As on the CPU itself: its own kernels, its allocator's rounding.
    monkeypatch.setattr("meshwright.rehearse.allocation_log.BLOCK_BYTES", 1)
    trace = trace_rank(run, 0, device=None)
    before = sum(event.num_bytes for event in trace.events[: trace.step_begins_at])
    assert step_peak(trace).allocated_bytes - before == _real_rise(run)


@pytest.mark.parametrize("name", ["zero_1", "zero_3", "pp_zero_3"])
def test_the_first_step_has_the_peak_of_the_third(name):
    trace = trace_rank(layout_run(name, compute="bf16"), 0, num_steps=3)
    peaks, live = [0, 0, 0], 0
    for event in trace.events:
        live += event.num_bytes
        step = trace.phases[event.phase_id].step
        if step >= 0:
            peaks[step] = max(peaks[step], live)
    assert peaks[0] == peaks[2] == step_peak(trace).allocated_bytes


def test_state_is_exact():
    run = small_run({"dp_shard": 4, "zero": 3}, microbatches=1).with_(optim=OptimSpec(kind="adamw"))
    items = step_peak(trace_rank(run, 0, num_steps=1)).items
    num_parameters = 2 * 512 * 128 + 128 + 4 * (128 * 256 * 3 + 128 * 128 * 3 + 2 * 128)
    # The shards of 9 norms are 128 B each and take the allocator's smallest block.
    slack = 9 * (512 - 128)
    assert items["weights"] == 4 * num_parameters // 4 + slack
    # Two moments.
    assert items["optimizer"] == 2 * (4 * num_parameters // 4 + slack)


def test_routed_experts_of_zero_3_are_recomputed_selectively():
    """FSDP wraps the experts inside a block, and marks its work for profilers once more the second time."""
    saved = []
    for recompute in ("selective", "none"):
        run = small_run(
            {"dp_shard": 4, "zero": 3, "ep": 4}, num_layers=2, recompute=recompute, compute="bf16"
        )
        routed = run.model.with_(moe=MoeSpec(num_experts=8, top_k=2, width=64))
        peak = step_peak(trace_rank(run.with_(model=routed), 0, num_steps=1))
        saved.append(peak.items["activations"])
    assert 0 < saved[0] < saved[1]


def test_recompute_saves_fewer_activations():
    saved = [
        step_peak(
            trace_rank(small_run({}, microbatches=1, recompute=kind, compute="bf16"), 0, num_steps=1)
        ).items["activations"]
        for kind in ("none", "selective", "full")
    ]
    assert saved[0] > saved[1] > saved[2]


def test_fp16_is_traced_without_the_gradient_norm_that_its_loss_scale_follows():
    """A fake tensor has no value; the scale is a number and takes no memory."""
    plain = small_run({}, microbatches=1, compute="fp16")
    scaled = plain.with_(precision=plain.precision.with_(loss_scale=LossScaleSpec()))
    assert step_peak(trace_rank(scaled, 0)).items == step_peak(trace_rank(plain, 0)).items


def test_a_rank_outside_the_world_is_refused():
    with pytest.raises(MeshError, match="rank 4 is outside a world of 4 ranks"):
        trace_rank(small_run({"dp_shard": 4, "zero": 3}), 4)


def test_collectives_have_their_axis_bytes_and_count():
    run = small_run({"tp": 2, "dp_shard": 2, "zero": 3}, compute="bf16")
    traffic = trace_rank(run, 0, num_steps=1).traffic
    # Two into and two out of each of 4 blocks, one into the head and one out of the embedding; and back.
    gathers = traffic["tp", "all-gather"]
    assert gathers.count == 2 * (4 * 4 + 2)
    assert gathers.num_bytes == gathers.count * 128 * 128 * 2
    assert traffic["dp_shard", "reduce-scatter"].count == 2 * 7


def test_what_is_offloaded_is_not_on_the_device():
    run = small_run({}, num_layers=2, microbatches=1)
    moved = run.with_(memory=run.memory.with_(offload="optimizer"))
    plain, without = (step_peak(trace_rank(one, 0, num_steps=1)) for one in (run, moved))
    assert plain.items["optimizer"] > 0
    assert without.items.get("optimizer", 0) == 0
    assert without.allocated_bytes < plain.allocated_bytes


@pytest.mark.parametrize("what", ["activations", "parameters"])
def test_what_is_offloaded_within_a_pass_is_in_host_memory(what):
    run = small_run({}, microbatches=1)
    moved = run.with_(memory=run.memory.with_(offload=what))
    # As on the CPU itself, so that the same program can report its buffers.
    plain, without = (traced(one, num_steps=1, device=None) for one in (run, moved))
    with fake_world(run.parallel, 0, torch.device("cpu")) as mesh:
        training = build_training(moved, mesh, fill=fill_random)
        train_step(training, zero_batch(moved), learning_rate=1e-3)
        held = training.weights.link.counters.pool_bytes
    assert plain.host_bytes == 0
    assert without.host_bytes == held > 0
    item = {"activations": "activations", "parameters": "weights"}[what]
    before, after = (step_peak(one).items.get(item, 0) for one in (plain, without))
    # Two of the four blocks are on the device at once, and what is no block's own.
    assert after < 0.75 * before


def test_shards_of_zero_3_on_the_host_are_not_traced():
    run = small_run({"dp_shard": 4, "zero": 3})
    moved = run.with_(memory=run.memory.with_(offload=("parameters", "optimizer")))
    with pytest.raises(SpecError, match="cannot tell shards that FSDP2 keeps on the host"):
        trace_rank(moved, 0)


@pytest.mark.parametrize("name", ["one", "zero_1", "zero_3", "pp_zero_3"])
def test_a_finished_training_frees_its_parameters(name):
    run = layout_run(name)
    with fake_world(run.parallel, 0, torch.device("cpu")) as mesh:
        training = build_training(run, mesh, fill=fill_random)
        train_step(training, zero_batch(run), learning_rate=1e-3)
        held = [weakref.ref(one.parameter) for one in training.program.shards]
        del training
    gc.collect()
    assert held
    assert not [one for one in held if one() is not None]


def test_rows_of_experts_travel_over_ep():
    run = small_run({"dp_shard": 4, "zero": 1, "ep": 2}, num_layers=2, compute="bf16")
    routed = run.model.with_(moe=MoeSpec(num_experts=8, top_k=2, width=64))
    traffic = trace_rank(run.with_(model=routed), 0, num_steps=1).traffic
    # Counts, rows and weights to the experts, rows back, and in backward all but the counts again; 2 layers,
    # 2 micro-batches.
    assert traffic["ep", "all-to-all"].count == 2 * 2 * 7
    assert ("dp_shard", "all-to-all") not in traffic
