"""What a trace says: classes, tensor cores, missed matmuls, phases, gaps, communication, memory."""

from typing import Any

import pytest
from tests.support import traces
from tests.support.traces import BF16, document, h200_document, kernel, memory, named, op, step

from meshwright.observe.profile.intervals import length, union, without
from meshwright.observe.profile.kernel_classes import class_of, class_of_op, uses_tensor_cores
from meshwright.observe.profile.operator_work import matmul_shape
from meshwright.observe.profile.rank_profile import RankProfile, Recorded, rank_profile
from meshwright.observe.profile.trace import read_trace


def profiled(events: dict[str, Any], **recorded: Any) -> RankProfile:
    return rank_profile(read_trace(events), Recorded(**recorded))


@pytest.mark.parametrize(
    ("name", "kind", "on_tensor_cores"),
    [
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNT", "matmul", True),
        ("nvjet_qqtst_128x256_128x6_2x1_v_bz_TNT", "matmul", True),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1", "matmul", True),
        ("sm90_xmma_gemm_f32f32_tf32f32_f32_nt_n_tilesize64x64x32", "matmul", True),
        (traces.SGEMM, "matmul", False),
        ("ampere_sgemm_128x64_tn", "matmul", False),
        ("ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn", "matmul", True),
        (traces.ALIGN2, "matmul", True),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nn_align1>", "matmul", False),
        ("void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16>", "matmul", False),
        (
            "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<GroupedGemm>>",
            "matmul",
            True,
        ),
        (traces.FLASH, "attention", True),
        (
            "void flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits>",
            "attention",
            True,
        ),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80", "attention", True),
        (traces.NCCL, "communication", False),
        ("Memcpy HtoD (Pinned -> Device)", "copy", False),
        ("triton_poi_fused_mul_silu_3", "element-wise", False),
        ("something_new", "other", False),
        ("triton_red_fused_native_layer_norm_2", "normalisation", False),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor>", "element-wise", False),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<AdamW>", "optimizer", False),
    ],
)
def test_kernels_are_classified_by_name(name: str, kind: str, *, on_tensor_cores: bool) -> None:
    assert class_of(name) == kind
    if kind in ("matmul", "attention"):
        assert uses_tensor_cores(name) == on_tensor_cores


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::mm", "matmul"),
        ("aten::addmm", "matmul"),
        ("aten::_scaled_mm", "matmul"),
        ("aten::_grouped_mm", "matmul"),
        ("aten::convolution", "matmul"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention"),
        ("aten::_fused_rms_norm", "normalisation"),
        ("aten::sum", "normalisation"),
        ("aten::mul", "element-wise"),
        ("aten::silu_backward", "element-wise"),
        ("aten::copy_", "copy"),
        ("aten::transpose", "other"),
        ("MulBackward0", "other"),
        ("autograd::engine::evaluate_function: MulBackward0", "other"),
        ("c10d::allreduce_", "communication"),
    ],
)
def test_operators_are_classified_by_name(name: str, kind: str) -> None:
    assert class_of_op(name) == kind


def test_time_that_overlaps_counts_once() -> None:
    assert length([(0, 2), (1, 3), (5, 6)]) == 4
    assert without([(0, 10)], [(1, 2), (4, 6), (9, 12)]) == [(0, 1), (2, 4), (6, 9)]
    assert union([(3, 4), (0, 1), (1, 2)]) == [(0, 2), (3, 4)]


def test_rows_of_operands_and_result_follow_from_the_strides() -> None:
    """A transposed operand is contiguous along its first dim: that is what the kernel loads."""
    event = op("aten::mm", 0, 1, dims=[[64, 100], [100, 30]], strides=[[100, 1], [1, 100]], dtype=BF16)
    (found,) = read_trace(document(event)).ops
    shape = matmul_shape(found)
    assert shape is not None and shape.rows_bytes == (200, 200, 60)
    assert (shape.m, shape.k, shape.n, shape.dtype, shape.flops) == (64, 100, 30, "bf16", 2.0 * 64 * 100 * 30)


def test_an_aligned_step_on_an_h200_misses_nothing() -> None:
    found = profiled(h200_document(), step_seconds=0.006, data_seconds=1e-4)
    assert found.is_cuda and not found.missed
    assert found.tensor_core_share == pytest.approx(3000 / 3600)
    assert [row.kind for row in found.classes][:2] == ["matmul", "communication"]
    by_kind = {row.kind: row for row in found.classes}
    assert by_kind["attention"].flops == pytest.approx(4 * 0.5 * 4 * 16 * 2048 * 2048 * 128)
    assert by_kind["matmul"].intensity and by_kind["matmul"].intensity > 500
    norm = by_kind["normalisation"].intensity
    assert norm is not None and norm < 5


def test_a_misaligned_head_is_named_with_shape_dtype_and_gain() -> None:
    found = profiled(h200_document(width=2049), step_seconds=0.0152, data_seconds=1e-4)
    (missed,) = found.missed
    assert (missed.row.shape.m, missed.row.shape.k, missed.row.shape.n) == (8192, 2049, 32064)
    assert missed.row.shape.dtype == "bf16" and missed.dims == (2049,)
    assert "4098 bytes, which is no multiple of 16" in missed.why
    # 1500 of 10714 microseconds are the head with an aligned width.
    assert missed.low_seconds <= 0.00921 <= missed.high_seconds * 1.1
    assert missed.high_seconds <= missed.row.seconds


def test_fp32_matmuls_on_general_cores_are_named() -> None:
    found = profiled(
        document(
            step(0, 1000),
            op("aten::mm", 10, 5, dims=[[512, 512], [512, 512]], strides=[[512, 1], [512, 1]], number=1),
            kernel(traces.SGEMM, 100, 200, number=1, launched_at=12),
        )
    )
    assert [one.why for one in found.missed] == ["fp32 runs on the general cores"]
    assert found.tensor_core_share == 0.0


def test_a_step_is_forward_backward_update_communication_data_and_gaps() -> None:
    found = profiled(h200_document(), step_seconds=0.006, data_seconds=1e-4)
    parts = {name: round(1e6 * seconds) for name, seconds in found.breakdown.items()}
    assert parts == {
        "forward": 2700,
        "backward": 400,
        "update": 500,
        "exposed communication": 500,  # 100 of 600 are overlapped with the backward matmul
        "data wait": 100,
        "gaps": 1800,
    }
    assert sum(found.breakdown.values()) == pytest.approx(found.step_seconds)


def test_operators_of_a_cpu_count_their_own_time() -> None:
    found = profiled(
        document(
            step(0, 1000, data=50),
            op("aten::linear", 100, 300, dims=[[8, 16, 32], [64, 32]]),
            op("aten::mm", 150, 200, dims=[[128, 32], [32, 64]], strides=[[32, 1], [1, 32]]),
            op("autograd::engine::evaluate_function: MulBackward0", 500, 200),
            op("aten::mul", 550, 100, dims=[[128, 64], [128, 64]]),
        )
    )
    assert not found.is_cuda and found.missed == [] and found.tensor_core_share == 0.0
    seconds = {row.kind: round(1e6 * row.seconds) for row in found.classes}
    assert seconds == {"matmul": 300, "other": 100, "element-wise": 100}
    assert {row.kind: row.flops for row in found.classes}["matmul"] == 2.0 * 128 * 32 * 64
    assert round(1e6 * found.data_seconds) == 50 and round(1e6 * found.breakdown["backward"]) == 200
    assert found.step_seconds == pytest.approx(1e-3) and round(1e6 * found.gap_seconds) == 450


def test_collectives_of_gloo_are_exposed_where_nothing_computes() -> None:
    found = profiled(
        document(
            step(0, 1000),
            op("aten::mul", 100, 300, dims=[[4, 4], [4, 4]]),
            named("gloo:all_reduce", 300, 400, thread=9),
        )
    )
    assert round(1e6 * found.communication_seconds) == 400
    assert round(1e6 * found.exposed_seconds) == 300


def test_memory_is_classified_by_when_it_is_made_and_freed() -> None:
    found = profiled(
        document(
            step(0, 1000),
            memory(100, 400, 1),  # freed in backward: an activation
            memory(110, 50, 2),
            memory(120, -50, 2),  # freed in forward: workspace
            op("autograd::engine::evaluate_function: MmBackward0", 300, 200),
            memory(350, 70, 3),  # freed in the update: a gradient
            memory(400, -400, 1),
            named("Optimizer.step#AdamW.step", 600, 100),
            memory(650, 20, 4),  # stays: optimizer state
            memory(800, -70, 3),
        ),
        known={900: ("parameters", 1000)},
    )
    assert found.memory is not None
    assert found.memory.peak_bytes == 1000 + 400 + 70
    assert found.memory.peak_by_category["activations"] == 400
    assert found.memory.peak_by_category["parameters"] == 1000
    assert max(found.memory.bytes_by_category["gradients"]) == 70
    assert max(found.memory.bytes_by_category["optimizer state"]) == 20
    assert max(found.memory.bytes_by_category["workspace"]) == 50


def test_on_a_device_what_is_not_known_is_other() -> None:
    events = document(
        step(0, 1000),
        memory(10, 8, 77),  # on the host
        memory(100, 400, 1, 1900, device=1),
        kernel("triton_poi_fused_add_0", 200, 10, launched_at=150),
    )
    found = profiled(events, known={900: ("parameters", 1000)})
    assert found.memory is not None and found.memory.peak_bytes == 1900
    assert found.memory.peak_by_category["other"] == 500 + 400  # 400 is never freed
