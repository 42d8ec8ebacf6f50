"""Bytes per rank: the formulas of the decks, what divides what, and the published figures."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.soak import examples

from meshwright.hardware import parse_cluster
from meshwright.plan.framework import Framework, our_runtime
from meshwright.plan.memory.in_flight import in_flight
from meshwright.plan.memory.rank_bytes import Memory, memory
from meshwright.plan.workload.layouts import FULL, NORMS, OFFLOAD_BITS, RECOMPUTE_SELECTIVE, Layouts, layouts
from meshwright.plan.workload.schedules import SCHEDULES, PipelineShape, actions, peak_in_flight
from meshwright.plan.workload.workload import Adapters, Workload
from meshwright.published.frameworks import find_framework
from meshwright.spec.families import family
from meshwright.spec.parameters import num_parameters

GIB = 2**30
STATE = ("weights", "gradients", "master", "optimizer")
A100_64 = parse_cluster("leonardo:1").with_devices(1)


def _memory(work: Workload, at: Layouts, stack: Framework | None = None) -> Memory:
    return memory(work, at, parse_cluster("h100:8x16"), stack or our_runtime())


def _state_bytes(found: Memory) -> float:
    return sum(float(found.items[name][0, 0]) for name in STATE)


def test_our_state_is_sixteen_bytes_per_parameter() -> None:
    """fp32 weight, gradient and two moments: 4 + 4 + 8."""
    model = family("llama-3.1-8b")
    found = _memory(Workload(model, 2048), layouts(num_microbatches=4))
    assert _state_bytes(found) == 16 * num_parameters(model)


def test_megatron_state_is_eighteen_bytes_and_six_with_everything_sharded() -> None:
    model = family("llama-3.1-8b")
    work = Workload(model, 2048)
    whole = _memory(work, layouts(num_microbatches=4), find_framework("megatron"))
    assert _state_bytes(whole) == 18 * num_parameters(model)
    sharded = _memory(work, layouts(dp_shard=64, zero=1, num_microbatches=4), find_framework("megatron"))
    assert _state_bytes(sharded) == pytest.approx((6 + 12 / 64) * num_parameters(model))


def test_one_billion_parameters_at_sixteen_bytes_are_14_90_gib() -> None:
    assert pytest.approx(14.90, abs=0.005) == 16 * 1e9 / GIB
    # 175 B parameters in fp32; the deck truncates 651.926.
    assert int(175e9 * 4 / GIB * 100) / 100 == 651.92


@examples(40)
@given(
    dp=st.sampled_from([2, 8, 64]),
    tp=st.sampled_from([1, 2, 8]),
    pp=st.sampled_from([1, 2, 4]),
    name=st.sampled_from(["llama-3.1-8b", "qwen3-30b-a3b"]),
)
def test_state_falls_with_the_zero_stage(dp: int, tp: int, pp: int, name: str) -> None:
    work = Workload(family(name), 2048)
    # Whole gradients of experts wait for the end of each backward, at ZeRO-2 beside shards of earlier ones.
    items = STATE if work.model.moe is None else ("weights", "master", "optimizer")
    found = [
        _memory(work, layouts(dp_shard=dp, tp=tp, pp=pp, zero=zero, num_microbatches=8)) for zero in range(4)
    ]
    states = [sum(float(one.items[item][0, 0]) for item in items) for one in found]
    assert states == sorted(states, reverse=True)
    assert states[3] < states[0]


@pytest.mark.parametrize("recompute", [RECOMPUTE_SELECTIVE, FULL])
def test_recompute_never_keeps_more(recompute: int) -> None:
    work, stack = Workload(family("llama-3.1-8b"), 8192), our_runtime()
    none = stack.layer_activation_bytes(work, layouts(), moe=False)[0]
    less = stack.layer_activation_bytes(work, layouts(recompute=recompute), moe=False)[0]
    half = stack.layer_activation_bytes(work, layouts(recompute=recompute, recompute_every=2), moe=False)[0]
    assert less < none
    assert half == pytest.approx((none + less) / 2)


def test_activations_of_a_layer_are_what_a_trace_found() -> None:
    """Llama-8B layer at 8192 tokens with eager SwiGLU and a bf16 residual stream, traced: 1313 MiB.

    With the gathered inputs of tp=8 kept: 276. Full recompute keeps the layer's input, 64.
    """
    work = Workload(family("llama-3.1-8b"), 8192)
    peer = find_framework("nanotron")
    stack = replace(peer, rotation_bytes=0.0)

    def mebibytes(at: Layouts) -> float:
        return float(stack.layer_activation_bytes(work, at, moe=False)[0]) / 2**20

    assert mebibytes(layouts()) == pytest.approx(1313, rel=0.005)
    # Within 3%: the trace also holds the statistics of norms.
    assert mebibytes(layouts(tp=8)) == pytest.approx(276, rel=0.03)
    assert mebibytes(layouts(recompute=FULL)) == pytest.approx(64)


def test_a_norm_recomputed_under_fp8_saves_nothing() -> None:
    at, plain = layouts(recompute=NORMS), layouts()
    fp8 = Workload(family("llama-3.1-8b"), 4096, "fp8")
    stack = find_framework("megatron")
    kept = stack.layer_activation_bytes(fp8, at, moe=False)[0]
    assert kept == stack.layer_activation_bytes(fp8, plain, moe=False)[0]
    bf16 = replace(fp8, precision="bf16")
    assert stack.layer_activation_bytes(bf16, at, moe=False)[0] < kept


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("micro", [8, 16])
@pytest.mark.parametrize(("schedule", "virtual"), [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2)])
def test_micro_batches_in_flight_are_the_schedules(schedule: str, virtual: int, pp: int, micro: int) -> None:
    """The closed form equals a count over the order that torch runs."""
    index = SCHEDULES.index(schedule)  # type: ignore[arg-type]
    at = layouts(pp=pp, virtual_stages=virtual, num_microbatches=micro, schedule=index)
    orders = actions(SCHEDULES[index], PipelineShape(pp, virtual, micro))
    for column, rank in enumerate((0, min(1, pp - 1), pp - 1)):
        counted = peak_in_flight(orders[rank]) / virtual
        # The closed form of an interleaved schedule may hold one chunk more than the order does.
        assert in_flight(at)[0, column] == pytest.approx(counted, abs=1 / virtual)


def test_zero_three_with_a_pipeline_keeps_weights_gathered() -> None:
    work = Workload(family("llama-3.1-70b"), 4096)
    flat = _memory(work, layouts(dp_shard=16, tp=8, zero=3, num_microbatches=8))
    piped = _memory(work, layouts(dp_shard=4, tp=8, pp=4, zero=3, num_microbatches=8))
    assert piped.items["gathered"][0, 1] > flat.items["gathered"][0, 0]


def test_logits_stand_on_the_last_rank_only() -> None:
    found = _memory(Workload(family("llama-3.1-8b"), 4096), layouts(pp=4, num_microbatches=8))
    assert found.items["logits"][0, 2] > 20 * found.items["logits"][0, 0]


def test_offload_moves_the_optimizer_to_the_host() -> None:
    work = Workload(family("llama-3.1-8b"), 4096)
    here, there = _memory(work, layouts()), _memory(work, layouts(offload=OFFLOAD_BITS["optimizer"]))
    saved = here.peak_allocated_bytes[0] - there.peak_allocated_bytes[0]
    assert saved == 8 * num_parameters(work.model)


def test_device_bytes_hold_reserved_hold_allocated() -> None:
    found = _memory(
        Workload(family("llama-3.1-8b"), 4096), layouts(tp=2, dp_shard=4, pp=2, num_microbatches=8)
    )
    assert (found.allocated_bytes < found.reserved_bytes).all()
    assert (found.reserved_bytes < found.device_bytes).all()


def test_many_layouts_are_priced_as_each_alone() -> None:
    work = Workload(family("qwen3-30b-a3b"), 4096)
    columns = {"tp": [1, 2, 4], "pp": [1, 2, 4], "dp_shard": [8, 4, 2], "ep": [8, 2, 1], "zero": [3, 1, 0]}
    together = _memory(work, layouts(num_microbatches=8, **{k: np.array(v) for k, v in columns.items()}))
    for row in range(3):
        alone = _memory(
            work, layouts(num_microbatches=8, **{name: values[row] for name, values in columns.items()})
        )
        assert together.peak_device_bytes[row] == pytest.approx(alone.peak_device_bytes[0], rel=1e-12)


class TestOneA100With64:
    """The decks: a 7B model with Adam does not fit one A100-64GB, in fp32 or in half precision."""

    def test_fp32_never_fits(self) -> None:
        work = Workload(family("llama-2-7b"), 4096, "fp32")
        for recompute in (0, RECOMPUTE_SELECTIVE, FULL):
            found = memory(work, layouts(recompute=recompute), A100_64, our_runtime())
            assert not found.fits(A100_64)[0]

    def test_half_precision_fits_with_full_recompute_only(self) -> None:
        """Everything in 16 bits: 8 bytes per parameter, 50 GiB of state."""
        work = Workload(family("llama-2-7b"), 4096, "bf16", optimizer="adamw_bf16")
        stack = find_framework("pure-bf16")
        kept = memory(work, layouts(), A100_64, stack)
        recomputed = memory(work, layouts(recompute=FULL), A100_64, stack)
        assert not kept.fits(A100_64)[0]
        assert recomputed.fits(A100_64)[0]

    def test_adapters_fit_where_full_training_does_not(self) -> None:
        work = Workload(family("llama-3.1-8b"), 2048, adapters=Adapters())
        four_bits = Workload(family("llama-3.1-8b"), 2048, adapters=Adapters(base_bits=4))
        at, stack = layouts(recompute=FULL), find_framework("accelerate-fsdp")
        lora, qlora = memory(work, at, A100_64, stack), memory(four_bits, at, A100_64, stack)
        assert lora.fits(A100_64)[0]
        # 12 of 16 bits of 8 B weights.
        saved = lora.peak_allocated_bytes[0] - qlora.peak_allocated_bytes[0]
        assert saved == pytest.approx(1.5 * num_parameters(work.model), rel=0.05)


def test_dropout_of_adapters_stores_no_mask() -> None:
    """A trace of 4 layers of Llama 3.1 8B with 4096 tokens, compiled, has 2294 MiB of activations without
    recompute, and 2290 with dropout. With selective recompute 1216 MiB are added: the outputs of adapters."""
    model = family("llama-3.1-8b").with_(num_layers=4)

    def activations(recompute: int, *, has_dropout: bool) -> float:
        work = Workload(model, 2048, compiled=True, adapters=Adapters(has_dropout=has_dropout))
        found = _memory(work, layouts(recompute=recompute, microbatch_sequences=2))
        return found.items["activations"].max()

    assert activations(0, has_dropout=True) == activations(0, has_dropout=False)
    assert activations(FULL, has_dropout=True) == activations(FULL, has_dropout=False)
    kept = RECOMPUTE_SELECTIVE
    added = activations(kept, has_dropout=True) - activations(kept, has_dropout=False)
    assert added / 2**20 == pytest.approx(1216, rel=0.15)
