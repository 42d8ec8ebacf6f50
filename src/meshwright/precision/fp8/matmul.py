"""a b^T of two quantised tensors: on the tensor cores that take fp8, emulated elsewhere.

The only file that calls `torch._scaled_mm`: torch has a public face for it (`functional.scaled_mm`) only in
its newest releases, and the compiler of older ones does not know that face.
"""

import torch
from torch import Tensor

from meshwright.hardware.simulated_device import SimulatedDevice
from meshwright.precision.fp8.quantise import Quantised, decode
from meshwright.precision.fp8.recipes import Recipe

# Scales of 1 x 128 blocks are multiplied inside the kernel, which torch built with this CUDA or later has.
_BLOCKS_SINCE = (12, 9)


def is_native(recipe: Recipe, device: torch.device, simulated: SimulatedDevice | None = None) -> bool:
    """Whether the tensor cores of this device take the fp8 operands of this recipe."""
    if simulated is not None:
        return recipe.needs <= simulated.capability
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    capability = torch.cuda.get_device_capability(device)
    if recipe.token_block == (1, 128):  # of Hopper alone: Blackwell has the 32-blocks instead
        cuda = tuple(int(part) for part in torch.version.cuda.split(".")[:2])
        return cuda >= _BLOCKS_SINCE and capability[0] == recipe.needs[0]
    return capability >= recipe.needs


def matmul(a: Quantised, b: Quantised, *, to: torch.dtype, native: bool, fast: bool = False) -> Tensor:
    """y[M, N] = a[M, K] b[N, K]^T in dtype `to`; `fast` lets Hopper sum with fewer bits."""
    if not native:
        return emulated_matmul(a, b, to=to)
    if a.unit.ndim == 0:
        return torch._scaled_mm(
            a.values_MK, b.values_MK.t(), a.unit, b.unit, out_dtype=to, use_fast_accum=fast
        )
    if a.unit.shape[1] * 32 == a.values_MK.shape[1]:
        return _mx_matmul(a.values_MK, b.values_MK, a.unit, b.unit).to(to)
    return _block_matmul(a.values_MK, b.values_MK, a.unit.t().contiguous(), b.unit.t().contiguous()).to(to)


def emulated_matmul(a: Quantised, b: Quantised, *, to: torch.dtype) -> Tensor:
    """The same product of the same fp8 numbers, which are exact in the wider format, with wider sums."""
    if a.values_MK.device.type == "cuda" and to != torch.float64:
        return torch.mm(decode(a, torch.bfloat16), decode(b, torch.bfloat16).t()).to(to)
    wide = torch.float64 if to == torch.float64 else torch.float32
    return torch.mm(decode(a, wide), decode(b, wide).t()).to(to)


@torch.library.custom_op("meshwright::fp8_block_matmul", mutates_args=())
def _block_matmul(a_MK: Tensor, b_NK: Tensor, unit_a_CM: Tensor, unit_b_CN: Tensor) -> Tensor:
    """y[M, N] in bf16. An operator of its own, so that tracing does not depend on torch's shape checks."""
    return torch._scaled_mm(a_MK, b_NK.t(), unit_a_CM.t(), unit_b_CN, out_dtype=torch.bfloat16)


@_block_matmul.register_fake
def _(a_MK: Tensor, b_NK: Tensor, unit_a_CM: Tensor, unit_b_CN: Tensor) -> Tensor:
    return a_MK.new_empty((a_MK.shape[0], b_NK.shape[0]), dtype=torch.bfloat16)


@torch.library.custom_op("meshwright::mxfp8_matmul", mutates_args=())
def _mx_matmul(a_MK: Tensor, b_NK: Tensor, unit_a_MC: Tensor, unit_b_NC: Tensor) -> Tensor:
    """y[M, N] in bf16 of operands whose runs of 32 share an E8M0 scale."""
    scales = (tiled_scales(unit_a_MC), tiled_scales(unit_b_NC))
    return torch._scaled_mm(a_MK, b_NK.t(), *scales, out_dtype=torch.bfloat16)


@_mx_matmul.register_fake
def _(a_MK: Tensor, b_NK: Tensor, unit_a_MC: Tensor, unit_b_NC: Tensor) -> Tensor:
    return a_MK.new_empty((a_MK.shape[0], b_NK.shape[0]), dtype=torch.bfloat16)


def tiled_scales(unit_MC: Tensor) -> Tensor:
    """Units as E8M0 bytes in the order in which Blackwell's tensor cores read them.

    Tiles of 128 rows x 4 columns lie one after the other, 512 bytes each; inside one, row r and column c
    stand at 16 (r mod 32) + 4 (r div 32) + c. Tiles that hang over are filled with zeros.
    """
    exponents = (unit_MC.view(torch.int32) >> 23).to(torch.uint8)
    rows, columns = exponents.shape
    padded = torch.nn.functional.pad(exponents, (0, -columns % 4, 0, -rows % 128))
    tiles = padded.view(-(-rows // 128), 4, 32, -(-columns // 4), 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(torch.float8_e8m0fnu)


# The operators that do the work of a product: what selective recompute keeps.
OPERATORS = (
    torch.ops.aten._scaled_mm.default,
    torch.ops.meshwright.fp8_block_matmul.default,
    torch.ops.meshwright.mxfp8_matmul.default,
)
