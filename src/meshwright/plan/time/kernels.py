"""Seconds of one kernel on one device: a roofline, with an efficiency that depends on the shape."""

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
# Rate of grouped matmuls (routed experts) against a single one.
GROUPED_RATE = 0.48
# Rate of flash attention against the device's best matmul, at head width 128 and long sequences.
FLASH_FORWARD, FLASH_BACKWARD = 0.68, 0.56
FLASH_HALF_RATE_SEQUENCE = 384.0
# FLOPs of the backward kernel over those of the forward kernel, which it partly recomputes.
FLASH_BACKWARD_FLOPS = 2.5


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


def matmul_seconds(matmul: Matmul, device: Device, workload: Workload) -> Floats:
    """Roofline of one (grouped) matmul: tensor cores at the shape's efficiency, or memory."""
    rate = _matmul_rate(matmul, device, workload)
    efficiency = tile_efficiency(matmul.m, matmul.n, matmul.groups, device)
    efficiency = efficiency * matmul.k / (matmul.k + HALF_RATE_K)
    if matmul.part == "experts":
        efficiency = np.where(matmul.groups > 1, GROUPED_RATE, 1.0) * efficiency
    elements = matmul.m * matmul.k + matmul.k * matmul.n + matmul.m * matmul.n
    moved = workload.working_bytes * matmul.groups * elements
    return KERNEL_SECONDS + np.maximum(matmul.flops / (rate * efficiency), moved / copy_rate(device))


def _matmul_rate(matmul: Matmul, device: Device, workload: Workload) -> float:
    """FLOP/s of this matmul in the mean layer: an fp8 recipe may leave some layers in bf16."""
    bf16 = device.matmul_ceiling(workload.activation_precision)
    if not runs_in_low_precision(matmul, workload):
        return bf16
    share = workload.low_precision_layers
    return 1.0 / (share / device.matmul_ceiling(workload.matmul_rate) + (1.0 - share) / bf16)


def flash_seconds(flops: Floats, device: Device, workload: Workload, *, backward: bool) -> Floats:
    """Seconds of a flash attention kernel, whose rate falls with short heads and short sequences."""
    attention = workload.model.attention
    width = 0.5 * (attention.head_width + attention.value_width)
    shape = (
        1.25
        * width
        / (width + 32.0)
        * workload.sequence_length
        / (workload.sequence_length + FLASH_HALF_RATE_SEQUENCE)
    )
    share = FLASH_BACKWARD if backward else FLASH_FORWARD
    ceiling = device.matmul_ceiling(workload.activation_precision)
    best = device.best_attention_flops_per_second or share * ceiling
    factor = FLASH_BACKWARD_FLOPS if backward else 1.0
    return KERNEL_SECONDS + factor * flops / (best * min(shape, 1.1))
