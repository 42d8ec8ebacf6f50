"""Kernels of the step by themselves: matmuls by matrix, and the loss kernel by block size."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from meshwright.bench.timing import measure
from meshwright.ops import loss_triton

# By case: tokens of a micro-batch, and (rows out, columns in) of the matrices, unfused and fused.
MATRICES = {
    "1b": (32768, {"q": (2048, 2048), "k": (512, 2048), "qkv": (3072, 2048), "up": (8192, 2048),
                   "gate+up": (16384, 2048), "down": (2048, 8192)}),
    "124m": (65536, {"q": (768, 768), "qkv": (2304, 768), "up": (3072, 768), "down": (768, 3072)}),
    "8b": (8192, {"q": (4096, 4096), "k": (1024, 4096), "qkv": (6144, 4096), "up": (14336, 4096),
                  "gate+up": (28672, 4096), "down": (4096, 14336)}),
}  # fmt: skip
# By case: vocabulary, width, and rows of a chunk of the loss.
HEADS = {"1b": (128256, 2048, (4096, 8192, 16384, 32768)), "8b": (128256, 4096, (4096, 8192)),
         "124m": (50304, 768, (8192, 9363, 16384, 32768, 65536))}  # fmt: skip
BLOCKS = ((2048, 4), (2048, 8), (4096, 4), (4096, 8), (4096, 16), (8192, 16), (8192, 32), (16384, 32))
"""Columns of a block and warps of the loss kernel."""


def gemm_table(case: str, device: torch.device, seconds: float = 0.2) -> Iterator[str]:
    """TFLOP/s in bf16 of forward, input-gradient and weight-gradient matmuls by matrix; then of the head."""

    def rate(call: Callable[[], Any], flops: float) -> str:
        return f"{flops / measure(call, device, seconds=seconds).median / 1e12:>7.0f}"

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    def rates(x: Tensor, w: Tensor, dy: Tensor) -> str:
        total = torch.zeros(w.shape, device=device)
        into = partial(torch.addmm, total, dy.mT, x, out_dtype=torch.float32, out=total)
        calls = [
            partial(torch.mm, x, w.mT, out=torch.empty_like(dy)),
            partial(torch.mm, dy, w, out=torch.empty_like(x)),
            partial(torch.mm, dy, w.mT.contiguous().mT, out=torch.empty_like(x)),
            partial(torch.mm, dy.mT, x),
            partial(into, beta=0),
            partial(into, beta=1),
        ]
        return " ".join(rate(call, 2.0 * x.shape[0] * w.numel()) for call in calls)

    tokens, matrices = MATRICES[case]
    large = normal(8192, 8192)
    measure(partial(torch.mm, large, large), device, seconds=1.0)  # a warm device lowers its clock
    yield f"{'matrix':<10} {'y':>7} {'dx':>7} {'dx, W^T':>7} {'dW':>7} {'dW fp32':>7} {'+= fp32':>7}"
    for name, (n, k) in matrices.items():
        yield f"{name:<10} {rates(normal(tokens, k), normal(n, k), normal(tokens, n))}"
    v, d, chunks = HEADS[case]
    w = normal(v, d)
    for rows in chunks:
        yield f"head {rows:<5} {rates(normal(rows, d), w, normal(rows, v))}"


def loss_table(case: str, device: torch.device) -> Iterator[str]:
    """Time of the loss kernel for 1 GiB of logits by block and warps; TB/s of one read and one write."""
    v = HEADS[case][0]
    num_rows = 2**30 // (2 * v)
    targets_T = torch.randint(v, (num_rows,), device=device)

    def timed(call: Callable[[Tensor], Any]) -> str:
        logits_TV = torch.randn(num_rows, v, device=device, dtype=torch.bfloat16)
        seconds = measure(partial(call, logits_TV), device, seconds=0.1).median
        return f"{seconds * 1e3:>7.3f} ms {2 * logits_TV.nbytes / seconds / 1e12:>6.2f} TB/s"

    for block, warps in BLOCKS:
        with patch.multiple(loss_triton, BLOCK_COLUMNS=block, NUM_WARPS=warps):
            yield f"{block:>6} {warps:>4}  {timed(lambda one: loss_triton.unscaled_gradient(one, targets_T))}"
