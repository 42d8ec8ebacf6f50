"""Chrome traces as torch's profiler writes them, built by hand: on a CPU, and with the kernels of an H200."""

from collections.abc import Sequence
from typing import Any

from meshwright.observe.profile.trace import DATA_RANGE, STEP_RANGE

Event = dict[str, Any]
BF16 = "c10::BFloat16"


def op(
    name: str,
    start: float,
    duration: float,
    *,
    dims: Sequence[Any] = (),
    strides: Sequence[Any] = (),
    dtype: str = "float",
    values: Sequence[str] = (),
    thread: int = 1,
    number: int | None = None,
) -> Event:
    """An operator on the host; times are microseconds."""
    arguments: Event = {"Input Dims": list(dims), "Input type": [dtype if one else "" for one in dims]}
    arguments |= {"Input Strides": list(strides)} if strides else {}
    arguments |= {"Concrete Inputs": list(values)} if values else {}
    arguments |= {"External id": number} if number is not None else {}
    return _event("cpu_op", name, thread, start, duration, arguments)


def named(name: str, start: float, duration: float, *, thread: int = 1) -> Event:
    """A range of `record_function`."""
    return _event("user_annotation", name, thread, start, duration, {})


def step(start: float, duration: float, *, data: float = 0.0) -> list[Event]:
    """A step with the fetch of its batch before it."""
    return [named(DATA_RANGE, start, data), named(STEP_RANGE, start + data, duration - data)]


def kernel(
    name: str,
    start: float,
    duration: float,
    *,
    number: int | None = None,
    launched_at: float | None = None,
    stream: int = 7,
) -> list[Event]:
    """A kernel on the device and, with `launched_at`, its launch on the host."""
    arguments: Event = {"stream": stream, "correlation": int(start * 1000) + stream}
    arguments |= {"External id": number} if number is not None else {}
    category = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
    ran = _event(category, name, stream, start, duration, arguments)
    if launched_at is None:
        return [ran]
    launch = {"correlation": arguments["correlation"]}
    return [ran, _event("cuda_runtime", "cudaLaunchKernel", 1, launched_at, 2.0, launch)]


def _event(category: str, name: str, thread: int, start: float, duration: float, arguments: Event) -> Event:
    times = {"tid": thread, "ts": start, "dur": duration}
    return {"ph": "X", "cat": category, "name": name, **times, "args": arguments}


def memory(at: float, num_bytes: int, address: int, total: int = 0, *, device: int = 0) -> Event:
    """An allocation, or a free with negative bytes."""
    arguments = {"Bytes": num_bytes, "Addr": address, "Total Allocated": total, "Device Type": device}
    return {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "tid": 1, "ts": at, "args": arguments}


def document(*events: Event | list[Event], origin_nanoseconds: int = 0) -> dict[str, Any]:
    """The file that `export_chrome_trace` writes."""
    flat = [one for event in events for one in (event if isinstance(event, list) else [event])]
    return {"baseTimeNanoseconds": origin_nanoseconds, "traceEvents": flat}


NVJET = "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNT"
ALIGN2 = "void cutlass::Kernel2<cutlass_75_wmma_tensorop_bf16_s161616gemm_bf16_32x32_64x1_tn_align1>"
FLASH = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0"
NCCL = "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
ADAM = "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>"
ROWS = 8192
SGEMM = "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stage3_warpsize2x2x1_ffma_aligna4_alignc4"


def h200_document(*, width: int = 2048) -> dict[str, Any]:
    """One step of 10 ms on an H200: two aligned matmuls, the head, attention, a norm, reduction and update.

    With an odd `width` the head's rows are not aligned, and it runs in a slow kernel.
    """
    head = NVJET if width % 8 == 0 else ALIGN2
    head_us = 1500.0 if width % 8 == 0 else 1500.0 / 0.14
    late, qkv = head_us - 1500.0, [4, 16, 2048, 128]
    return document(
        step(0.0, 11_000.0 + late, data=100.0),
        _matmul(1, 200, 2048, 8192),
        kernel(NVJET, 1000, 400, number=1, launched_at=210),
        _matmul(2, 230, 8192, 2048),
        kernel(NVJET, 1400, 400, number=2, launched_at=240),
        op(
            "aten::_scaled_dot_product_cudnn_attention",
            *(260, 30),
            dims=[qkv, qkv, qkv],
            dtype=BF16,
            values=["", "", "", "True"],
            number=3,
        ),
        kernel(FLASH, 1800, 300, number=3, launched_at=270),
        op("triton_red_fused_rms_norm_1", 300, 10, dims=[[ROWS, 2048], [2048]], dtype=BF16, number=4),
        kernel("triton_red_fused_rms_norm_1", 2100, 100, number=4, launched_at=305),
        _matmul(5, 320, width, 32064),
        kernel(head, 2300, head_us, number=5, launched_at=330),
        op("autograd::engine::evaluate_function: MmBackward0", 400, 60, thread=2, number=6),
        _matmul(7, 410, 2048, 8192, thread=2),
        kernel(NVJET, 3900 + late, 400, number=7, launched_at=420),
        kernel(NCCL, 4200 + late, 600, launched_at=450, stream=20),
        named("Optimizer.step#AdamW.step", 500, 100),
        op("aten::_foreach_add_", 510, 10, number=8),
        kernel(ADAM, 5000 + late, 500, number=8, launched_at=515),
    )


def _matmul(number: int, start: float, k: int, n: int, *, thread: int = 1) -> Event:
    """[ROWS, k] x [k, n] with the second operand transposed, as the weight of a linear layer is."""
    shapes, strides = [[ROWS, k], [k, n]], [[k, 1], [1, k]]
    return op("aten::mm", start, 20, dims=shapes, strides=strides, dtype=BF16, number=number, thread=thread)
