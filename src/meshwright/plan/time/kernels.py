"""Seconds of one kernel on one device: a roofline with the efficiency that its shape allows."""

import numpy as np

from meshwright.hardware.catalogue import Device
from meshwright.plan.workload.layouts import Floats
from meshwright.plan.workload.operators import Matmul, is_narrow
from meshwright.plan.workload.workload import Workload

# Part of the data-sheet memory bandwidth that streaming kernels reach.
MEMORY_EFFICIENCY = 0.80
# Inner dim at which a tile's prologue and epilogue cost as much as its products.
HALF_RATE_K = 160.0
# How much of the idle tail of the last wave is lost; schedulers split work along k to fill it.
WAVE_LOSS = 0.5
KERNEL_SECONDS = 3e-6
TILES = ((128, 256), (256, 128), (128, 128))
# A smaller tile reuses less from shared memory.
TILE_RATE = (1.0, 1.0, 0.93)
GROUPED_RATE = 0.48
# Attention against the device's best matmul: forward and backward kernels at width 128 and long sequences.
FLASH_FORWARD, FLASH_BACKWARD = 0.68, 0.56
FLASH_HALF_RATE_SEQUENCE = 384.0
BACKWARD_ATTENTION_WORK = 2.5


def copy_rate(device: Device) -> float:
    """Bytes per second of a kernel that only moves memory."""
    return device.copy_bytes_per_second or MEMORY_EFFICIENCY * device.memory_bytes_per_second


def tile_efficiency(m: Floats, n: Floats, groups: Floats, device: Device) -> Floats:
    """Useful part of the tiles computed: edges of tiles that hang over, and the last wave over the SMs."""
    best = np.zeros_like(m)
    for (rows, columns), rate in zip(TILES, TILE_RATE, strict=True):
        tiles = np.ceil(m / rows) * np.ceil(n / columns) * groups
        useful = m * n * groups / (tiles * rows * columns)
        waves = tiles / device.num_sms
        idle = np.ceil(waves) / waves - 1.0
        best = np.maximum(best, rate * useful / (1.0 + WAVE_LOSS * idle))
    return best


def matmul_seconds(matmul: Matmul, device: Device, work: Workload) -> Floats:
    """Roofline of one (grouped) product: tensor cores at the shape's efficiency, or memory."""
    rate = _matmul_rate(matmul, device, work)
    efficiency = tile_efficiency(matmul.m, matmul.n, matmul.groups, device)
    efficiency = efficiency * matmul.k / (matmul.k + HALF_RATE_K)
    if matmul.part == "experts":
        efficiency = np.where(matmul.groups > 1, GROUPED_RATE, 1.0) * efficiency
    elements = matmul.m * matmul.k + matmul.k * matmul.n + matmul.m * matmul.n
    moved = work.working_bytes * matmul.groups * elements
    return KERNEL_SECONDS + np.maximum(matmul.flops / (rate * efficiency), moved / copy_rate(device))


def _matmul_rate(matmul: Matmul, device: Device, work: Workload) -> float:
    """Of the mean layer: a narrow recipe may leave some of them, and routed experts, as they are."""
    wide = device.matmul_ceiling(work.wide_precision)
    if not is_narrow(matmul, work):
        return wide
    share = work.narrow_layers
    return 1.0 / (share / device.matmul_ceiling(work.matmul_rate) + (1.0 - share) / wide)


def flash_seconds(flops: Floats, device: Device, work: Workload, *, backward: bool) -> Floats:
    """A fused attention kernel: slower for narrow heads and short sequences, the causal half skipped."""
    attention = work.model.attention
    width = 0.5 * (attention.head_width + attention.value_width)
    shape = (
        1.25
        * width
        / (width + 32.0)
        * work.sequence_length
        / (work.sequence_length + FLASH_HALF_RATE_SEQUENCE)
    )
    share = FLASH_BACKWARD if backward else FLASH_FORWARD
    best = device.best_attention_flops_per_second or share * device.matmul_ceiling(work.wide_precision)
    work_factor = BACKWARD_ATTENTION_WORK if backward else 1.0
    return KERNEL_SECONDS + work_factor * flops / (best * min(shape, 1.1))
