"""Seconds of one kernel on one device: a roofline, with an efficiency that depends on the shape."""

from dataclasses import dataclass

import numpy as np

from meshwright.hardware.catalogue import Device
from meshwright.plan.workload.layouts import Floats
from meshwright.plan.workload.operators import Matmul, runs_in_low_precision
from meshwright.plan.workload.workload import Workload

# Share of the data-sheet memory bandwidth that streaming kernels reach.
MEMORY_EFFICIENCY = 0.80
# Inner dim k at which a tile's prologue and epilogue take as long as its multiplications.
HALF_RATE_K = 160.0
# Share of the idle tail of the last wave that is lost; split-k and stream-k fill the rest.
WAVE_LOSS = 0.5
KERNEL_SECONDS = 3e-6
TILES = ((128, 256), (256, 128), (128, 128))
# Rate of each tile against the largest: a smaller tile reuses less from shared memory.
TILE_RATE = (1.0, 1.0, 0.93)


@dataclass(frozen=True)
class MisalignedRates:
    """Rates of matmuls that have a row of no multiple of 16 bytes, against aligned ones.

    Measured on one H200 (bench/results/alignment_h200_2026-11-16.json). Earlier devices lose less: nanoGPT
    reports a step 25% faster with 50304 tokens in the vocabulary instead of 50257 on A100.
    """

    half_aligned: float
    """Rows of a multiple of 4 bytes."""
    odd_result: float
    odd_operand: float


HOPPER_MISALIGNED = MisalignedRates(half_aligned=0.39, odd_result=0.14, odd_operand=0.21)
EARLIER_MISALIGNED = MisalignedRates(half_aligned=0.6, odd_result=0.45, odd_operand=0.45)
ALIGNED_BYTES, HALF_ALIGNED_BYTES = 16, 4


def copy_rate(device: Device) -> float:
    """Bytes per second of a kernel that only moves memory."""
    return device.copy_bytes_per_second or MEMORY_EFFICIENCY * device.memory_bytes_per_second


def tile_efficiency(m: Floats, n: Floats, groups: Floats, device: Device) -> Floats:
    """Share of the computed tiles that is useful: less for partial tiles and for a partial last wave."""
    best = np.zeros_like(m)
    for (rows, columns), rate in zip(TILES, TILE_RATE, strict=True):
        tiles = np.ceil(m / rows) * np.ceil(n / columns) * groups
        useful = m * n * groups / (tiles * rows * columns)
        waves = tiles / device.num_sms
        idle = np.ceil(waves) / waves - 1.0
        best = np.maximum(best, rate * useful / (1.0 + WAVE_LOSS * idle))
    return best


def matmul_seconds(
    matmul: Matmul, device: Device, workload: Workload, *, grouped_rate: float = 1.0
) -> Floats:
    """Roofline of one (grouped) matmul: tensor cores at the shape's efficiency, or memory."""
    rate = _matmul_rate(matmul, device, workload)
    efficiency = tile_efficiency(matmul.m, matmul.n, matmul.groups, device)
    efficiency = efficiency * matmul.k / (matmul.k + HALF_RATE_K) * alignment_rate(matmul, device, workload)
    if matmul.part == "experts":
        efficiency = np.where(matmul.groups > 1, grouped_rate, 1.0) * efficiency
    elements = matmul.m * matmul.k + matmul.k * matmul.n + matmul.m * matmul.n
    moved = workload.working_bytes * matmul.groups * elements
    return KERNEL_SECONDS + np.maximum(matmul.flops / (rate * efficiency), moved / copy_rate(device))


def alignment_rate(matmul: Matmul, device: Device, workload: Workload) -> Floats:
    """Rate of a matmul with these widths against that with aligned ones; tokens are rows and do not count."""
    rates = HOPPER_MISALIGNED if "fp8" in device.peak_flops_per_second else EARLIER_MISALIGNED
    result, operand = matmul.n, matmul.m if matmul.sums_tokens else matmul.k
    if not (workload.working_bytes * (result + operand) % ALIGNED_BYTES).any():
        return np.ones_like(result)
    odd_result = rates.odd_operand if matmul.sums_tokens else rates.odd_result
    by_result = _row_rate(workload.working_bytes * result, rates.half_aligned, odd_result)
    by_operand = _row_rate(workload.working_bytes * operand, rates.half_aligned, rates.odd_operand)
    return np.minimum(by_result, by_operand)


def _row_rate(row_bytes: Floats, half_aligned: float, odd: float) -> Floats:
    is_half_aligned = row_bytes % HALF_ALIGNED_BYTES == 0
    return np.where(row_bytes % ALIGNED_BYTES == 0, 1.0, np.where(is_half_aligned, half_aligned, odd))


def _matmul_rate(matmul: Matmul, device: Device, workload: Workload) -> float:
    """FLOP/s of this matmul in the mean layer: an fp8 recipe may leave some layers in bf16."""
    bf16 = device.matmul_ceiling(workload.activation_precision)
    if not runs_in_low_precision(matmul, workload):
        return bf16
    share = workload.low_precision_layers
    return 1.0 / (share / device.matmul_ceiling(workload.matmul_rate) + (1.0 - share) / bf16)
