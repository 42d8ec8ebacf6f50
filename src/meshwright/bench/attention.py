"""Causal attention by kernel, head width and sequence length, forward and backward; torch's default kernel.

FLOPs count the causal half only, and the backward pass as 2.5 times the forward pass.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from meshwright.bench.kernel_time import profiled
from meshwright.bench.timing import measure
from meshwright.ops.torch_dispatch import TorchDispatchMode

Row = dict[str, Any]
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
# Tokens of one call, whatever the sequence length.
TOKENS = {"cuda": 16384, "cpu": 256}
SEQUENCES = {"cuda": (1024, 2048, 4096, 8192, 16384), "cpu": (64, 128, 256)}
HEADS = {"cuda": (32, 8), "cpu": (4, 2)}
# Beyond this length the math kernel's score matrix does not fit.
_LONGEST_MATH = 2048
_OPERATORS = {
    "cudnn": "_scaled_dot_product_cudnn_attention",
    "flash": "_scaled_dot_product_flash_attention",
    "efficient": "_scaled_dot_product_efficient_attention",
}
# Kernels that a CPU has.
_ON_CPU = ("flash", "math")


def attention_rows(
    device: torch.device, *, seconds: float, widths: tuple[int, ...] = (64, 128)
) -> Iterator[Row]:
    """One row per kernel, head width and sequence length; a kernel that refuses a case gives an error row."""
    for width in widths:
        for sequence in SEQUENCES[device.type]:
            chosen = default_backend(device, sequence, width)
            for name in backends_of(device, sequence):
                row = time_attention(name, device, sequence, width, seconds=seconds)
                seen = profiled_kernel(name, device, sequence, width) if name == chosen else None
                yield {**row, "is_chosen": name == chosen, "kernel": seen}


def backends_of(device: torch.device, sequence: int) -> list[str]:
    """The kernels that are measured on this device at this sequence length."""
    known = BACKENDS if device.type == "cuda" else _ON_CPU
    return [name for name in known if name != "math" or sequence <= _LONGEST_MATH]


def time_attention(backend: str, device: torch.device, sequence: int, width: int, *, seconds: float) -> Row:
    """Forward and backward seconds of one kernel, and their TFLOP/s."""
    batch = max(1, TOKENS[device.type] // sequence)
    heads, groups = HEADS[device.type]
    row: Row = {
        "backend": backend,
        "batch": batch,
        "sequence": sequence,
        "heads": heads,
        "kv_heads": groups,
        "head_width": width,
        "precision": "bf16",
    }
    inputs = _inputs(device, batch, sequence, width)
    try:
        with sdpa_kernel(BACKENDS[backend]):
            forward = measure(_call(*inputs), device, seconds=seconds)
            both = measure(_call_and_backward(*inputs), device, seconds=seconds)
    except RuntimeError as error:
        return {**row, "error": _error_text(error)}
    flops = 2.0 * batch * heads * sequence**2 * width
    backward = max(both.median - forward.median, 1e-9)
    return row | {
        "forward_seconds": forward.median,
        "backward_seconds": backward,
        "forward_teraflops": flops / forward.median / 1e12,
        "backward_teraflops": 2.5 * flops / backward / 1e12,
        "spread": both.spread,
    }


def _error_text(error: RuntimeError) -> str:
    """A short text; torch lists the reasons of every kernel."""
    text = str(error).splitlines()[0]
    is_refusal = "backend" in text or "kernel" in text
    return "not available for this case" if is_refusal else text[:100]


def _inputs(device: torch.device, batch: int, sequence: int, width: int) -> list[Tensor]:
    heads, groups = HEADS[device.type]
    shapes = [(batch, count, sequence, width) for count in (heads, groups, groups)]
    return [torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]


def _call(q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    return lambda: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _call_and_backward(q: Tensor, k: Tensor, v: Tensor) -> Callable[[], object]:
    grad = torch.randn_like(q)
    call = _call(q, k, v)
    return lambda: torch.autograd.grad(call(), (q, k, v), grad)


def default_backend(device: torch.device, sequence: int, width: int) -> str:
    """The kernel that torch chooses by default, found from the operators that it calls."""
    batch = max(1, TOKENS[device.type] // sequence)
    call = _call(*_inputs(device, batch, sequence, width))
    with _OperatorNames() as called:
        call()
    found = [name for name, operator in _OPERATORS.items() if any(operator in each for each in called.names)]
    return found[0] if found else "math"  # it has no operator of its own: matmuls and a softmax


def profiled_kernel(backend: str, device: torch.device, sequence: int, width: int) -> str | None:
    """The profiler's name of the kernel that runs; None on a CPU."""
    if device.type != "cuda":
        return None
    call = _call(*_inputs(device, max(1, TOKENS[device.type] // sequence), sequence, width))
    with sdpa_kernel(BACKENDS[backend]):
        names = profiled(call, num_steps=1).attention_kernels
    return names[0] if names else None


class _OperatorNames(TorchDispatchMode):
    """Collects the names of the operators that are called inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))
