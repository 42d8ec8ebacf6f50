"""Step time: what it is made of, how it moves, and that many layouts cost as each alone."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.soak import examples

from meshwright.hardware import parse_cluster
from meshwright.plan.framework import our_runtime
from meshwright.plan.time import kernels
from meshwright.plan.time.step_time import stage_seconds, step_cost
from meshwright.plan.time.timeline import finish_seconds
from meshwright.plan.workload.layouts import (
    CP_KINDS,
    EP_OVERLAPS,
    FULL,
    RECOMPUTE_SELECTIVE,
    Layouts,
    layouts,
)
from meshwright.plan.workload.operators import Matmul
from meshwright.plan.workload.schedules import SCHEDULES, PipelineShape
from meshwright.plan.workload.workload import Adapters, Workload
from meshwright.published.frameworks import find_framework
from meshwright.spec.families import family

LLAMA = Workload(family("llama-3.1-8b"), 4096)
H100 = parse_cluster("dgx-h100:8")


def _seconds(at: Layouts, workload: Workload = LLAMA, on: str = "dgx-h100:8") -> float:
    return float(step_cost(workload, at, parse_cluster(on), our_runtime()).step_seconds[0])


def _matmul(m: float, n: float, k: float) -> Matmul:
    return Matmul("x", np.full(1, m), np.full(1, n), np.full(1, k), np.ones(1))


def test_items_are_seconds_and_add_up() -> None:
    cost = step_cost(LLAMA, layouts(tp=2, pp=2, dp_shard=4, zero=1, num_microbatches=8), H100, our_runtime())
    assert all((seconds >= 0).all() for seconds in cost.items.values())
    assert cost.step_seconds[0] == pytest.approx(sum(float(s[0]) for s in cost.items.values()))
    assert 0 < cost.relative_half_width[0] < 1


def test_routed_blocks_with_ep_and_selective_recompute_are_not_compiled() -> None:
    """The host reads row counts in them (parallel/compile.py); full recompute compiles their parts."""
    workload = Workload(family("qwen3-30b-a3b"), 4096, compiled=True)
    shared = our_runtime().compiled_share
    at = layouts(ep=np.array([1, 8, 8]), recompute=np.array([RECOMPUTE_SELECTIVE, RECOMPUTE_SELECTIVE, FULL]))
    assert shared(workload, at, moe=True).tolist() == [1.0, 0.0, 1.0]
    assert shared(workload, at, moe=False).tolist() == [1.0, 1.0, 1.0]
    some = layouts(ep=8, recompute=RECOMPUTE_SELECTIVE, recompute_every=2)
    assert shared(workload, some, moe=True).tolist() == [0.5]


def test_rings_with_selective_recompute_are_not_compiled() -> None:
    """torch's compiler does not trace messages between ranks; full recompute compiles what is around."""
    workload = Workload(LLAMA, 4096, compiled=True)
    kinds = np.array([CP_KINDS.index(kind) for kind in ("gather", "ring", "ulysses", "hierarchical", "ring")])
    recompute = np.array([*[RECOMPUTE_SELECTIVE] * 4, FULL])
    at = layouts(cp=4, cp_kind=kinds, recompute=recompute)
    assert our_runtime().compiled_share(workload, at, moe=False).tolist() == [1.0, 0.0, 1.0, 0.0, 1.0]


def test_many_layouts_cost_as_each_alone() -> None:
    columns = {"tp": [1, 2, 8], "pp": [1, 4, 2], "dp_shard": [64, 8, 4], "zero": [3, 1, 0]}
    together = step_cost(
        LLAMA,
        layouts(num_microbatches=8, **{k: np.array(v) for k, v in columns.items()}),
        H100,
        our_runtime(),
    )
    for row in range(3):
        at = layouts(num_microbatches=8, **{name: values[row] for name, values in columns.items()})
        assert together.step_seconds[row] == pytest.approx(_seconds(at), rel=1e-12)


class TestShapes:
    """Tile and wave quantisation, memory bound and the ceiling."""

    def test_no_shape_beats_the_ceiling(self) -> None:
        device = H100.device
        big = _matmul(16384, 16384, 16384)
        rate = big.flops[0] / kernels.matmul_seconds(big, device, LLAMA)[0]
        assert 0.85 * device.matmul_ceiling("bf16") < rate <= device.matmul_ceiling("bf16")

    def test_a_padded_vocabulary_is_faster_per_column(self) -> None:
        """One column past a tile costs a full tile of columns."""
        device = H100.device
        aligned = kernels.matmul_seconds(_matmul(4096, 4096, 4096), device, LLAMA)[0]
        over = kernels.matmul_seconds(_matmul(4096, 4097, 4096), device, LLAMA)[0]
        assert over > 1.01 * aligned

    def test_a_thin_matmul_is_bound_by_memory(self) -> None:
        device = H100.device
        thin = _matmul(16, 8192, 8192)
        moved = 2.0 * (16 * 8192 + 8192 * 8192 + 16 * 8192)
        seconds = kernels.matmul_seconds(thin, device, LLAMA)[0]
        assert seconds == pytest.approx(kernels.KERNEL_SECONDS + moved / kernels.copy_rate(device))


class TestDirections:
    """What must make a step slower or faster."""

    def test_recompute_costs_time(self) -> None:
        each = (0, RECOMPUTE_SELECTIVE, FULL)
        none, some, full = (_seconds(layouts(recompute=bits, num_microbatches=32)) for bits in each)
        assert none < some < full
        # One more forward pass of three passes, but for the last matmul of each block.
        last = LLAMA.model.mlp.width * LLAMA.model.width / LLAMA.counts.dense_layer
        assert full / none == pytest.approx(1 + (1 - last) / 3, rel=0.03)

    def test_tp_past_the_node_is_a_cliff(self) -> None:
        workload = Workload(family("llama-3.1-70b"), 4096)
        inside = _seconds(layouts(tp=8, dp_shard=8, zero=1, num_microbatches=8), workload)
        beyond = _seconds(layouts(tp=16, dp_shard=4, zero=1, num_microbatches=16), workload)
        assert beyond > 1.2 * inside

    def test_zero_three_at_a_small_micro_batch_waits_for_the_network(self) -> None:
        workload = Workload(family("llama-3.1-70b"), 2048)
        small = step_cost(workload, layouts(dp_shard=64, zero=3, num_microbatches=4), H100, our_runtime())
        large = step_cost(workload, layouts(dp_shard=64, zero=3, microbatch_sequences=4), H100, our_runtime())
        assert small.items["fsdp"][0] > 3 * large.items["fsdp"][0]

    def test_the_same_batch_on_more_devices_loses_efficiency(self) -> None:
        """A small model on 64 nodes: gradients no longer overlap with the little compute left."""
        few = _seconds(layouts(dp_shard=64, zero=1, num_microbatches=8))
        many = _seconds(layouts(dp_shard=512, zero=1), on="dgx-h100:64")
        assert many > 1.2 * few / 8

    def test_dp_is_exposed_only_once_per_step(self) -> None:
        one = step_cost(LLAMA, layouts(dp_shard=64, zero=1, num_microbatches=1), H100, our_runtime())
        many = step_cost(LLAMA, layouts(dp_shard=64, zero=1, num_microbatches=16), H100, our_runtime())
        assert many.items["dp"][0] <= one.items["dp"][0] * 1.01

    def test_fp8_is_faster_but_not_twice(self) -> None:
        bf16, fp8 = _seconds(layouts()), _seconds(layouts(), replace(LLAMA, precision="fp8"))
        assert 1.1 < bf16 / fp8 < 1.9

    def test_offloading_the_optimizer_costs_host_transfers(self) -> None:
        plain, away = layouts(dp_shard=8, zero=1), layouts(dp_shard=8, zero=1, offload=1)
        assert _seconds(away) > _seconds(plain)
        superchip = _seconds(away, on="gh200:1x8") - _seconds(plain, on="gh200:1x8")
        assert superchip < _seconds(away) - _seconds(plain)

    def test_adapters_skip_the_weight_gradient(self) -> None:
        workload = Workload(family("llama-3.1-8b"), 4096, adapters=Adapters())
        at = layouts(num_microbatches=32)
        # Two of three matmul passes, no casts of weights, no gradient accumulation; the rest is the same.
        assert 0.6 < _seconds(at, workload) / _seconds(at) < 0.8

    def test_compiled_blocks_move_fewer_bytes_and_launch_less(self) -> None:
        small = Workload(family("llama-3.2-1b"), 1024)
        compiled = Workload(family("llama-3.2-1b"), 1024, compiled=True)
        at = layouts(num_microbatches=8)
        eager, fused = (step_cost(w, at, H100, our_runtime()).items for w in (small, compiled))
        assert fused["elementwise"][0] < eager["elementwise"][0]
        assert fused["host"][0] < eager["host"][0]

    def test_four_bit_weights_are_dequantised_in_every_pass(self) -> None:
        lora = Workload(family("llama-3.1-8b"), 4096, adapters=Adapters())
        qlora = Workload(family("llama-3.1-8b"), 4096, adapters=Adapters(base_bits=4))
        assert _seconds(layouts(), qlora) > _seconds(layouts(), lora)

    def test_dropout_of_adapters_moves_bytes_and_with_dora_repeats_frozen_matmuls(self) -> None:
        plain, dropped, dora = (
            step_cost(
                Workload(family("llama-3.1-8b"), 4096, adapters=adapters), layouts(), H100, our_runtime()
            ).items
            for adapters in (
                Adapters(),
                Adapters(has_dropout=True),
                Adapters(has_dropout=True, is_dora=True),
            )
        )
        assert dropped["elementwise"][0] > 1.1 * plain["elementwise"][0]
        assert dropped["matmul"][0] == plain["matmul"][0]
        assert dora["matmul"][0] == pytest.approx(2 * plain["matmul"][0])

    def test_dora_is_up_to_a_quarter_slower(self) -> None:
        """Norms of the weights in each forward, and outputs that are scaled."""
        plain, dora = (
            _seconds(layouts(), Workload(family("llama-3.1-8b"), 4096, adapters=adapters))
            for adapters in (Adapters(), Adapters(is_dora=True))
        )
        assert 1.1 < dora / plain < 1.3


@examples(30)
@given(
    tp=st.sampled_from([1, 2, 4, 8]),
    pp=st.sampled_from([1, 2, 4]),
    micro=st.sampled_from([4, 8, 32]),
    zero=st.integers(0, 3),
)
def test_more_micro_batches_take_longer(tp: int, pp: int, micro: int, zero: int) -> None:
    few = _seconds(layouts(tp=tp, pp=pp, dp_shard=4, zero=zero, num_microbatches=micro))
    more = _seconds(layouts(tp=tp, pp=pp, dp_shard=4, zero=zero, num_microbatches=2 * micro))
    assert few < more < 2.01 * few


@pytest.mark.parametrize(
    ("schedule", "virtual"),
    [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_zero_bubble", 2), ("zbv", 2)],
)
@pytest.mark.parametrize("pp", [2, 4])
def test_the_closed_form_is_near_the_simulation(schedule: str, virtual: int, pp: int) -> None:
    """Search prices pipelines by closed form; its error is at most 6% of a simulated step."""
    index = SCHEDULES.index(schedule)  # type: ignore[arg-type]
    at = layouts(pp=pp, virtual_stages=virtual, num_microbatches=16, schedule=index, tp=2)
    stack = find_framework("megatron")
    cost = step_cost(LLAMA, at, H100, stack)
    layers = [32 // (pp * virtual)] * (pp * virtual)
    simulated = float(
        finish_seconds(SCHEDULES[index], PipelineShape(pp, virtual, 16), stage_seconds(cost, layers))
    )
    after = sum(float(cost.items[name][0]) for name in ("dp", "optimizer", "offload"))
    assert float(cost.step_seconds[0]) - after == pytest.approx(simulated, rel=0.06)


def _rate(width: float, *, as_result: bool, on: str = "h200:1") -> float:
    shape = _matmul(16384, width, 2048) if as_result else _matmul(16384, 2048, width)
    seconds = kernels.matmul_seconds(shape, parse_cluster(on).device, LLAMA)
    return float(shape.flops[0] / seconds[0] / 1e12)


@pytest.mark.parametrize(
    ("width", "as_result", "measured"),
    [
        (7168, True, 672.8),
        (7172, True, 257.0),
        (7170, False, 278.0),
        (7201, True, 96.6),
        (7201, False, 142.0),
        (32003, True, 98.4),
        (32003, False, 144.0),
    ],
)
def test_odd_widths_run_at_their_measured_rate(width: int, as_result: bool, measured: float) -> None:
    """TFLOP/s of bench/results/alignment_h200_2026-11-16.json."""
    assert _rate(width, as_result=as_result) == pytest.approx(measured, rel=0.15)


def test_tokens_need_no_alignment() -> None:
    """Rows of all three matmuls of a linear are widths; the number of tokens is that of rows."""
    device = parse_cluster("h200:1").device
    for tokens in (16384.0, 16383.0):
        for one in (_matmul(tokens, 4096, 2048), *_matmul(tokens, 4096, 2048).backward()):
            assert kernels.alignment_rate(one, device, LLAMA)[0] == 1.0
    for one in (_matmul(16384, 4095, 2048), *_matmul(16384, 4095, 2048).backward()):
        assert kernels.alignment_rate(one, device, LLAMA)[0] < 0.25


def test_odd_widths_of_a_model_cost_more_than_padded_ones() -> None:
    model = family("llama-3.2-1b")

    def seconds(mlp: int, vocabulary: int) -> float:
        changed = model.with_(mlp=model.mlp.with_(width=mlp), vocab_size=vocabulary)
        return _seconds(layouts(microbatch_sequences=4), Workload(changed, 4096), "h200:1")

    assert seconds(7201, 32064) > 1.5 * seconds(7232, 32064)
    # The head pads its vocabulary itself: a copy of its weight is all that it costs.
    assert seconds(7232, 32064) < seconds(7232, 32003) < 1.01 * seconds(7232, 32064)


class TestExpertOverlap:
    """`ep_overlap`: exchanges of rows beside experts."""

    ROUTED = Workload(family("deepseek-v3"), 4096)
    ON = "dgx-h100:32"

    def _exposed(self, overlap: str, ep: int = 32) -> float:
        at = layouts(dp_shard=256, zero=1, ep=ep, ep_overlap=EP_OVERLAPS.index(overlap))
        items = step_cost(self.ROUTED, at, parse_cluster(self.ON), our_runtime()).items
        return float(items["ep"][0])

    def test_shared_experts_hide_at_most_one_of_two_exchanges(self) -> None:
        plain, shared = self._exposed("none"), self._exposed("shared")
        assert 0.5 * plain < shared < plain

    def test_halves_hide_at_most_three_of_four_exchanges(self) -> None:
        plain, halves = self._exposed("none"), self._exposed("halves")
        assert 0.25 * plain < halves < self._exposed("shared")

    def test_matmuls_of_half_the_rows_are_slower(self) -> None:
        def matmul_seconds(overlap: str) -> float:
            at = layouts(dp_shard=256, zero=1, ep=32, ep_overlap=EP_OVERLAPS.index(overlap))
            return float(step_cost(self.ROUTED, at, parse_cluster(self.ON), our_runtime()).items["matmul"][0])

        assert matmul_seconds("halves") > matmul_seconds("none") == matmul_seconds("shared")


def test_layouts_that_differ_only_in_ep_overlap_are_priced_apart() -> None:
    """Equal layers are priced once for many layouts; overlap of the all-to-alls makes them different."""
    routed = Workload(family("qwen3-30b-a3b"), 4096)
    at = layouts(dp_shard=64, ep=8, zero=2, num_microbatches=4, ep_overlap=np.arange(3))
    together = step_cost(routed, at, H100, our_runtime()).step_seconds
    alone = [step_cost(routed, at.take([row]), H100, our_runtime()).step_seconds[0] for row in range(3)]
    np.testing.assert_allclose(together, alone)
    assert len(set(np.round(alone, 9))) > 1


def test_routed_experts_in_fp8_save_time_but_their_weight_gradients_do_not() -> None:
    routed = Workload(family("mixtral-8x7b"), 4096, "fp8", keeps_low_precision_weights=True)
    at = layouts(dp_shard=64, zero=2, ep=8, microbatch_sequences=4, num_microbatches=8)
    plain, fp8, ours = (
        _seconds(at, replace(routed, low_precision_experts=experts, bf16_expert_gradients=bf16))
        for experts, bf16 in ((False, False), (True, False), (True, True))
    )
    assert fp8 < ours < plain
