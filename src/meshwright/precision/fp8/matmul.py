"""a b^T of two quantised tensors: on tensor cores that take fp8, emulated elsewhere.

This is the only file that calls the private `torch._scaled_mm`. Its public form, `functional.scaled_mm`,
exists only in torch's newest releases, and the compiler of older ones does not know it.
"""

import torch
from torch import Tensor

from meshwright.hardware.simulated_device import SimulatedDevice
from meshwright.precision.fp8.quantise import Quantised, decode
from meshwright.precision.fp8.recipes import Recipe

# The kernel that applies the scales of 1 x 128 blocks is in torch built with this CUDA or later.
_BLOCKS_SINCE = (12, 9)


def is_native(recipe: Recipe, device: torch.device, simulated: SimulatedDevice | None = None) -> bool:
    """Whether the tensor cores of this device take the fp8 operands of this recipe."""
    if simulated is not None:
        return recipe.min_capability <= simulated.capability
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    capability = torch.cuda.get_device_capability(device)
    if recipe.token_block == (1, 128):  # Hopper only: Blackwell has 1 x 32 blocks instead
        cuda = tuple(int(part) for part in torch.version.cuda.split(".")[:2])
        return cuda >= _BLOCKS_SINCE and capability[0] == recipe.min_capability[0]
    return capability >= recipe.min_capability


def matmul(
    a: Quantised, b: Quantised, *, to: torch.dtype, native: bool, fast_accumulation: bool = False
) -> Tensor:
    """y[M, N] = a[M, K] b[N, K]^T in dtype `to`; with fast accumulation Hopper sums with fewer bits."""
    if not native:
        return emulated_matmul(a, b, to=to)
    if a.scale.ndim == 0:
        return torch._scaled_mm(
            a.values_MK, b.values_MK.t(), a.scale, b.scale, out_dtype=to, use_fast_accum=fast_accumulation
        )
    if a.scale.shape[1] * 32 == a.values_MK.shape[1]:
        return _mx_matmul(a.values_MK, b.values_MK, a.scale, b.scale).to(to)
    return _block_matmul(a.values_MK, b.values_MK, a.scale.t().contiguous(), b.scale.t().contiguous()).to(to)


def emulated_matmul(a: Quantised, b: Quantised, *, to: torch.dtype) -> Tensor:
    """The same matmul of the dequantised values, which are exact in bf16 or fp32, with fp32 sums."""
    is_bf16 = a.values_MK.device.type == "cuda" and to != torch.float64
    dtype = torch.bfloat16 if is_bf16 else torch.float64 if to == torch.float64 else torch.float32
    y_MN = torch.mm(decode(a, dtype), decode(b, dtype).t())
    # Not `.to()` of the same dtype: compiled by torch 2.11, the autograd function gets gradients of zero.
    return y_MN if to == dtype else y_MN.to(to)


@torch.library.custom_op("meshwright::fp8_block_matmul", mutates_args=())
def _block_matmul(a_MK: Tensor, b_NK: Tensor, scale_a_CM: Tensor, scale_b_CN: Tensor) -> Tensor:
    """y[M, N] in bf16. A custom op, so that tracing does not depend on torch's shape checks."""
    return torch._scaled_mm(a_MK, b_NK.t(), scale_a_CM.t(), scale_b_CN, out_dtype=torch.bfloat16)


@_block_matmul.register_fake
def _(a_MK: Tensor, b_NK: Tensor, scale_a_CM: Tensor, scale_b_CN: Tensor) -> Tensor:
    return a_MK.new_empty((a_MK.shape[0], b_NK.shape[0]), dtype=torch.bfloat16)


@torch.library.custom_op("meshwright::mxfp8_matmul", mutates_args=())
def _mx_matmul(a_MK: Tensor, b_NK: Tensor, scale_a_MC: Tensor, scale_b_NC: Tensor) -> Tensor:
    """y[M, N] in bf16 of operands with an E8M0 scale for each 32 values."""
    scales = (tiled_scales(scale_a_MC), tiled_scales(scale_b_NC))
    return torch._scaled_mm(a_MK, b_NK.t(), *scales, out_dtype=torch.bfloat16)


@_mx_matmul.register_fake
def _(a_MK: Tensor, b_NK: Tensor, scale_a_MC: Tensor, scale_b_NC: Tensor) -> Tensor:
    return a_MK.new_empty((a_MK.shape[0], b_NK.shape[0]), dtype=torch.bfloat16)


def tiled_scales(scale_MC: Tensor) -> Tensor:
    """Scales as E8M0 bytes in the order in which Blackwell's tensor cores read them.

    Tiles of 128 rows x 4 columns are contiguous, 512 bytes each; inside a tile, row r and column c is at byte
    16 (r mod 32) + 4 (r div 32) + c. Incomplete tiles are padded with zeros.
    """
    exponents = (scale_MC.view(torch.int32) >> 23).to(torch.uint8)
    rows, columns = exponents.shape
    padded = torch.nn.functional.pad(exponents, (0, -columns % 4, 0, -rows % 128))
    tiles = padded.view(-(-rows // 128), 4, 32, -(-columns // 4), 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(torch.float8_e8m0fnu)


# The GEMM operators, whose outputs selective recompute saves.
FP8_OPERATORS = (
    torch.ops.aten._scaled_mm.default,
    torch.ops.meshwright.fp8_block_matmul.default,
    torch.ops.meshwright.mxfp8_matmul.default,
)
