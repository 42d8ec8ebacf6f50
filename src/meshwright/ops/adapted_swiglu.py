"""silu(gate) x up where gate and up still lack what their adapters (LoRA) add, and its backward with an amax.

    y[T, 2F] = plain + u[T, R] B^T,  h[T, F] = silu(gate) up  one pass
    dy[T, 2F] of dh, and the largest magnitude in dy          one pass

Apart, the sum, h and the amax would each read y or dy once more.
"""

from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional

from meshwright.ops.swiglu import swiglu_gradient

if find_spec("triton") is not None:  # comes with torch for CUDA
    from meshwright.ops.adapted_swiglu_triton import MAX_RANKS, add_and_activate
    from meshwright.ops.swiglu_triton import swiglu_backward

_HALF = (torch.bfloat16, torch.float16)


@torch.library.custom_op("meshwright::adapted_swiglu", mutates_args=())
def adapted_swiglu(plain_T2F: Tensor, u_TR: Tensor, b_2FR: Tensor) -> tuple[Tensor, Tensor]:
    """y = plain + u B^T, and h."""
    if plain_T2F.is_cuda and plain_T2F.dtype in _HALF and u_TR.shape[1] <= MAX_RANKS:
        return add_and_activate(plain_T2F, u_TR, b_2FR)
    y_T2F = torch.addmm(plain_T2F, u_TR, b_2FR.mT)
    gate_TF, up_TF = y_T2F.chunk(2, dim=-1)
    return y_T2F, functional.silu(gate_TF) * up_TF


@adapted_swiglu.register_fake
def _(plain_T2F: Tensor, u_TR: Tensor, b_2FR: Tensor) -> tuple[Tensor, Tensor]:
    del u_TR, b_2FR
    return torch.empty_like(plain_T2F), plain_T2F.new_empty((len(plain_T2F), plain_T2F.shape[1] // 2))


@torch.library.custom_op("meshwright::swiglu_gradient_with_amax", mutates_args=())
def swiglu_gradient_with_amax(dh_TF: Tensor, gate_up_T2F: Tensor) -> tuple[Tensor, Tensor]:
    """dgate and dup, concatenated, and fp32 values whose maximum is their amax; inf for a nan."""
    if gate_up_T2F.is_cuda and gate_up_T2F.dtype != torch.float64:
        amax = dh_TF.new_empty((len(dh_TF),), dtype=torch.float32)
        return swiglu_backward(dh_TF, gate_up_T2F, amax), amax
    dy_T2F = swiglu_gradient(dh_TF, gate_up_T2F)
    return dy_T2F, dy_T2F.abs().amax(1).float().nan_to_num(torch.inf, posinf=torch.inf)


@swiglu_gradient_with_amax.register_fake
def _(dh_TF: Tensor, gate_up_T2F: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(gate_up_T2F), dh_TF.new_empty((len(dh_TF),), dtype=torch.float32)
