"""Grouped matmuls of fp8 rows with the fp8 weights of their experts, on tensor cores.

    one scale per row and expert        torch's kernel (Hopper)
    scales of 128-blocks                a Triton kernel: torch has none

This is the only file that calls the private `torch._scaled_grouped_mm`. Its public form,
`functional.scaled_grouped_mm`, exists only in torch's newest releases.
"""

from importlib.util import find_spec

import torch
from torch import Tensor

from meshwright.hardware.simulated_device import SimulatedDevice
from meshwright.precision.fp8.expert_weights import QuantisedExperts
from meshwright.precision.fp8.quantise import Quantised
from meshwright.precision.fp8.recipes import Recipe

HAS_TRITON = find_spec("triton") is not None  # comes with torch for CUDA
if HAS_TRITON:
    from meshwright.precision.fp8.grouped_triton import grouped_block_kernel

_HOPPER = 9


def is_grouped_native(recipe: Recipe, device: torch.device, simulated: SimulatedDevice | None = None) -> bool:
    """Whether this device has a grouped kernel for the fp8 operands of this recipe."""
    if simulated is None and (device.type != "cuda" or torch.version.cuda is None):
        return False
    capability = torch.cuda.get_device_capability(device) if simulated is None else simulated.capability
    if recipe.token_block is None:
        return capability[0] == _HOPPER
    return capability >= recipe.min_capability and (HAS_TRITON or simulated is not None)


def grouped_matmul(
    a: Quantised, b: QuantisedExperts, ends_E: Tensor, *, fast_accumulation: bool = False
) -> Tensor:
    """y[M, N] in bf16: rows of a[M, K] times b[e, N, K]^T of their expert, which ends before row ends[e]."""
    if b.scale_ERC.shape[1:] == (1, 1) and a.scale.shape[1] == 1:
        scale_M, scale_E = a.scale.flatten(), b.scale_ERC.flatten()
        return _row_matmul(a.values_MK, b.values_ENK, scale_M, scale_E, ends_E, fast_accumulation)
    return _block_matmul(a.values_MK, b.values_ENK, a.scale.t().contiguous(), b.scale_ERC, ends_E)


@torch.library.custom_op("meshwright::fp8_grouped_matmul", mutates_args=())
def _row_matmul(
    a_MK: Tensor,
    b_ENK: Tensor,
    scale_M: Tensor,
    scale_E: Tensor,
    ends_E: Tensor,
    fast_accumulation: bool,  # noqa: FBT001 - an operator's schema
) -> Tensor:
    """A custom op, so that tracing does not depend on torch's shape checks."""
    if not len(a_MK):
        return _empty(a_MK, b_ENK)
    return torch._scaled_grouped_mm(
        a_MK,
        b_ENK.transpose(1, 2),
        scale_M,
        scale_E[:, None].expand(b_ENK.shape[:2]).contiguous(),
        offs=ends_E,
        out_dtype=torch.bfloat16,
        use_fast_accum=fast_accumulation,
    )


@_row_matmul.register_fake
def _(
    a_MK: Tensor,
    b_ENK: Tensor,
    scale_M: Tensor,
    scale_E: Tensor,
    ends_E: Tensor,
    fast_accumulation: bool,  # noqa: FBT001
) -> Tensor:
    return _empty(a_MK, b_ENK)


@torch.library.custom_op("meshwright::fp8_grouped_block_matmul", mutates_args=())
def _block_matmul(a_MK: Tensor, b_ENK: Tensor, scale_CM: Tensor, scale_ERC: Tensor, ends_E: Tensor) -> Tensor:
    y_MN = _empty(a_MK, b_ENK)
    if len(a_MK):
        grouped_block_kernel(a_MK, b_ENK, scale_CM, scale_ERC, ends_E, y_MN)
    return y_MN


@_block_matmul.register_fake
def _(a_MK: Tensor, b_ENK: Tensor, scale_CM: Tensor, scale_ERC: Tensor, ends_E: Tensor) -> Tensor:
    return _empty(a_MK, b_ENK)


def _empty(a_MK: Tensor, b_ENK: Tensor) -> Tensor:
    return a_MK.new_empty((a_MK.shape[0], b_ENK.shape[1]), dtype=torch.bfloat16)


# The GEMM operators, whose outputs selective recompute saves.
FP8_GROUPED_OPERATORS = (
    torch.ops.meshwright.fp8_grouped_matmul.default,
    torch.ops.meshwright.fp8_grouped_block_matmul.default,
)
