"""Matmuls (GEMM): TFLOP/s by precision on the shapes of real layers, and what odd sizes cost.

    squares     large square matmuls: the ceiling of each precision
    layers      the matmuls of one forward pass, by model and precision
    widths      one matmul while its width grows: tile and wave quantisation
    vocabulary  the output head with a vocabulary as published, and padded

A rate is 2 m n k over the median time, on random numbers.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from meshwright.bench.timing import measure
from meshwright.precision.fp8.matmul import matmul
from meshwright.precision.fp8.quantise import Quantised
from meshwright.spec import ModelSpec
from meshwright.spec.families import family

Row = dict[str, Any]
DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "tf32": torch.float32,
    "fp32": torch.float32,
}
# Rows of a matmul: the tokens of a micro-batch.
TOKENS = {"cuda": 8192, "cpu": 128}
VOCABULARIES = (50257, 50264, 50272, 50304, 51200)
_FP8_CAPABILITY = (8, 9)


def precisions_of(device: torch.device) -> list[str]:
    """The precisions that the device's matrix units support; on a CPU the two that CI has time for."""
    if device.type != "cuda":
        return ["fp32", "bf16"]
    capability = torch.cuda.get_device_capability(device)
    every = ["bf16", "fp16", "tf32", "fp32"]
    return [*every, "fp8"] if capability >= _FP8_CAPABILITY else every


def layer_shapes(model: ModelSpec) -> dict[str, tuple[int, int]]:
    """(n, k) of the matmuls of one layer and of the head, by name; query, key and value are fused."""
    attention = model.attention
    heads = attention.num_heads * attention.head_width
    qkv_width = heads + 2 * attention.num_kv_heads * attention.head_width
    return {
        "query, key, value": (qkv_width, model.width),
        "attention output": (model.width, heads),
        "mlp up": (model.mlp.width, model.width),
        "mlp down": (model.width, model.mlp.width),
        "head": (model.vocab_size, model.width),
    }


def matmul_call(m: int, n: int, k: int, precision: str, device: torch.device) -> Callable[[], Tensor]:
    """A call that multiplies a random (m, k) by the transpose of a random (n, k), as a linear layer does."""
    a_MK, b_NK = torch.randn(m, k, device=device), torch.randn(n, k, device=device)
    if precision == "fp8":
        one = torch.ones((), device=device)
        a, b = (Quantised(x.to(torch.float8_e4m3fn), one) for x in (a_MK, b_NK))
        return lambda: matmul(a, b, to=torch.bfloat16, native=True, fast_accumulation=True)
    dtype = DTYPES[precision]
    a_MK, b_NK = a_MK.to(dtype), b_NK.to(dtype)
    return lambda: torch.mm(a_MK, b_NK.t())


def time_matmul(m: int, n: int, k: int, precision: str, device: torch.device, *, seconds: float) -> Row:
    """One row: shape, precision, seconds and TFLOP/s; `fp32` is measured with TF32 off, `tf32` with it on."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        timing = measure(matmul_call(m, n, k, precision, device), device, seconds=seconds)
    finally:
        torch.set_float32_matmul_precision(before)
    return {
        "m": m,
        "n": n,
        "k": k,
        "precision": precision,
        "seconds": timing.median,
        "spread": timing.spread,
        "teraflops": 2.0 * m * n * k / timing.median / 1e12,
    }


def layers(device: torch.device, *, seconds: float, models: tuple[str, ...] = ()) -> Iterator[Row]:
    """The matmuls of real layers, by model and precision; on a CPU of one small model."""
    default = ("gpt2-124m", "llama-3.2-1b", "llama-3.1-8b") if device.type == "cuda" else ("gpt2-124m",)
    for name in models or default:
        for layer, (n, k) in layer_shapes(family(name)).items():
            for precision in precisions_of(device):
                if precision == "fp8" and (n % 16 or k % 16):
                    continue  # fp8 matmuls need multiples of 16
                row = time_matmul(TOKENS[device.type], n, k, precision, device, seconds=seconds)
                yield {"model": name, "layer": layer, **row}


def squares(device: torch.device, *, seconds: float) -> Iterator[Row]:
    """Large square matmuls: the ceiling of each precision."""
    for size in (4096, 8192) if device.type == "cuda" else (256, 512):
        for precision in precisions_of(device):
            row = time_matmul(size, size, size, precision, device, seconds=seconds)
            yield {"model": "square", "layer": str(size), **row}


def width_sweep(device: torch.device, *, seconds: float) -> Iterator[Row]:
    """One matmul while n grows in small steps, in the device's usual training precision."""
    is_cuda = device.type == "cuda"
    m = k = 4096 if is_cuda else 256
    widths = range(2048, 6145, 64) if is_cuda else range(128, 513, 32)
    for n in widths:
        yield time_matmul(m, n, k, "bf16" if is_cuda else "fp32", device, seconds=seconds)


def vocabulary_sizes(device: torch.device, *, seconds: float) -> Iterator[Row]:
    """The output head of GPT-2, its vocabulary as published and padded to multiples of 8, 32, 128, 1024."""
    precision = "bf16" if device.type == "cuda" else "fp32"
    rows = [
        time_matmul(TOKENS[device.type], n, 768, precision, device, seconds=seconds) for n in VOCABULARIES
    ]
    best = max(row["teraflops"] for row in rows)
    for row in rows:
        yield {**row, "of_best": row["teraflops"] / best}
