"""The dtypes of weights, gradients and matmuls, and the torch settings for them."""

import torch

from meshwright.errors import SpecError
from meshwright.spec import PrecisionSpec

COMPUTE_DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def full_precision_dtype(precision: PrecisionSpec) -> torch.dtype:
    """Dtype of optimizer states, losses and loss weights: fp32, or fp64 where the run computes in fp64."""
    return torch.float64 if precision.compute == "fp64" else torch.float32


FP8_MIN_CAPABILITY = (8, 9)
"""The first CUDA compute capability with fp8 matmuls."""


def weight_dtype(precision: PrecisionSpec) -> torch.dtype:
    """Dtype of the parameters that the model computes with."""
    return full_precision_dtype(precision) if precision.weights == "fp32" else torch.bfloat16


def gradient_dtype(precision: PrecisionSpec) -> torch.dtype:
    """Dtype in which gradients are stored and summed."""
    return torch.bfloat16 if precision.gradients == "bf16" else full_precision_dtype(precision)


def autocast_dtype(precision: PrecisionSpec) -> torch.dtype | None:
    """The 16-bit dtype of mixed precision; None where matmuls run in the dtype of the weights."""
    return COMPUTE_DTYPES[precision.compute] if precision.compute in ("bf16", "fp16") else None


def compute_context(precision: PrecisionSpec, device: torch.device) -> torch.autocast | None:
    """Autocast to decorate a forward with; None where matmuls run in the dtype of the weights."""
    dtype = autocast_dtype(precision)
    return torch.autocast(device.type, dtype=dtype) if dtype else None


def prepare_device(precision: PrecisionSpec, device: torch.device, *, deterministic: bool) -> None:
    """Set torch's own process-wide settings: TF32 matmuls, deterministic kernels."""
    if precision.compute == "tf32" and device.type != "cuda":
        raise SpecError(
            f"compute=tf32 needs a CUDA device, this one is {device.type}",
            where="precision.compute",
            hint="use fp32 here",
        )
    if precision.fp8 is not None and device.type == "cuda":
        _require_fp8(device)
    torch.set_float32_matmul_precision("high" if precision.compute == "tf32" else "highest")
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = not deterministic


def _require_fp8(device: torch.device) -> None:
    if torch.cuda.get_device_capability(device) < FP8_MIN_CAPABILITY:
        raise SpecError(
            f"{torch.cuda.get_device_name(device)} has no fp8 tensor cores",
            where="precision.fp8",
            hint="set precision.fp8=null: bf16 is its fastest format; fp8 needs Ada, Hopper or later",
        )
