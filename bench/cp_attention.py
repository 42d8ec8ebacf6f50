"""Attention of one context-parallel rank against 1/cp of the time of one device. Needs a CUDA device.

    python -m bench.cp_attention > bench/results/cp_attention_<device>_<date>.md

One process without communication: the rows of rank 1 attend to keys that are already local. Times are medians
after warm-up, by device events, of forward and backward together.
"""

import statistics
from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

from meshwright.ops.attention import (
    AttentionScope,
    Rows,
    RunningSoftmax,
    SavedQueries,
    attend,
    backward_part,
    forward_part,
)
from meshwright.ops.attention_aten import CUDNN, EFFICIENT, FLASH, Kernel, SdpaArgs
from meshwright.ops.documents import Segments, host_number
from meshwright.ops.varlen_attention import attend_segments
from meshwright.parallel.cp.zigzag import all_chunks, chunks_of

LENGTH, HEADS, GROUPS, WIDTH = 32768, 32, 8, 128
NUM_RUNS, NUM_WARM_UP = 20, 5
SCALE = WIDTH**-0.5
RANK = 1


def seconds(function: Callable[[], object]) -> tuple[float, float]:
    """Median seconds and spread (largest minus smallest) of one call."""
    for _ in range(NUM_WARM_UP):
        function()
    times = []
    for _ in range(NUM_RUNS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times), max(times) - min(times)


def heads(num_heads: int, length: int) -> torch.Tensor:
    shape = (1, length, num_heads, WIDTH)
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def one_device() -> Callable[[], object]:
    q, k, v = heads(HEADS, LENGTH), heads(GROUPS, LENGTH), heads(GROUPS, LENGTH)
    grad = torch.randn_like(q).transpose(1, 2)

    def run() -> None:
        inputs = (x.transpose(1, 2) for x in (q, k, v))
        scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True, scale=SCALE).backward(grad)

    return run


def gather(cp: int) -> Callable[[], object]:
    local = LENGTH // cp
    q, k, v = heads(HEADS, local), heads(GROUPS, LENGTH), heads(GROUPS, LENGTH)
    grad = torch.randn_like(q)
    scope = AttentionScope(Rows(chunks_of(RANK, cp, local)), Rows(all_chunks(cp, local)), SCALE)
    return lambda: attend(q, k, v, scope).backward(grad)


def ring(cp: int) -> Callable[[], object]:
    local = LENGTH // cp
    q, k, v = (x.detach() for x in (heads(HEADS, local), heads(GROUPS, local), heads(GROUPS, local)))
    grad = torch.randn_like(q)
    mine = Rows(chunks_of(RANK, cp, local))
    scopes = [AttentionScope(mine, Rows(chunks_of(owner, cp, local)), SCALE) for owner in range(cp)]

    def run() -> None:
        running = RunningSoftmax(q, WIDTH)
        for scope in scopes:
            forward_part(running, q, k, v, scope)
        out = running.out_BSHV.to(q.dtype)
        dq = torch.zeros_like(q, dtype=torch.float32)
        for scope in scopes:
            backward_part(SavedQueries(q, out, running.lse_BHS, grad), k, v, scope, dq)

    return run


def documents() -> Callable[[], object]:
    q, k, v = heads(HEADS, LENGTH), heads(GROUPS, LENGTH), heads(GROUPS, LENGTH)
    grad = torch.randn_like(q)
    offsets_P = torch.arange(0, LENGTH + 5000, 5000, dtype=torch.int32, device="cuda").clamp(max=LENGTH)
    segments = Segments(offsets_P, offsets_P, host_number(5000))
    return lambda: attend_segments(q, k, v, segments, scale=SCALE).backward(grad)


def kernel_row(kernel: Kernel, cover: str) -> str:
    length = 8192
    q, k, v = (heads(n, length).detach().transpose(1, 2) for n in (HEADS, GROUPS, GROUPS))
    bias = torch.zeros(1, 1, length, length, device="cuda", dtype=torch.bfloat16) if cover == "bias" else None
    rule = SdpaArgs(SCALE, causal=cover == "causal", bias_B1ST=bias)
    out, lse = kernel.forward(q, k, v, rule)
    flops = 4 * HEADS * length**2 * WIDTH * (0.5 if cover == "causal" else 1.0)
    forward, _ = seconds(lambda: kernel.forward(q, k, v, rule))
    backward, _ = seconds(lambda: kernel.backward(out, q, k, v, out, lse, rule))
    return f"| {kernel.name} | {cover} | {flops / forward / 1e12:.0f} | {2.5 * flops / backward / 1e12:.0f} |"


def main() -> None:
    """Print the two tables as Markdown."""
    device = torch.cuda.get_device_properties(0)
    print(f"# Attention of one cp rank on {device.name}\n")
    print(
        f"torch {torch.__version__}, bf16, B 1, S {LENGTH}, H {HEADS}, G {GROUPS}, K = V = {WIDTH}; ", end=""
    )
    print(f"median of {NUM_RUNS} after {NUM_WARM_UP} warm-up runs, forward and backward, no communication.\n")
    print("| case | milliseconds | spread | 1/cp of one device | above it |\n|---|---|---|---|---|")
    device_seconds, spread = seconds(one_device())
    print(f"| one device, SDPA | {device_seconds * 1e3:.2f} | {spread * 1e3:.2f} | - | - |")
    cases = [(f"{make.__name__}, cp {cp}", make(cp), cp) for cp in (2, 4, 8) for make in (gather, ring)]
    for name, run, cp in [*cases, ("documents of 5000, one device", documents(), 1)]:
        median, spread = seconds(run)
        share = device_seconds / cp
        cells = [
            name,
            f"{median * 1e3:.2f}",
            f"{spread * 1e3:.2f}",
            f"{share * 1e3:.2f}",
            f"{median / share - 1:+.0%}",
        ]
        print("| " + " | ".join(cells) + " |")
    print("\nKernels that return the log-sum-exp, one block of 8192 x 8192, TFLOP/s:\n")
    print("| kernel | cover | forward | backward |\n|---|---|---|---|")
    for kernel in (CUDNN, FLASH, EFFICIENT):
        for cover in ("causal", "full", "bias"):
            if not (kernel is FLASH and cover == "bias"):
                print(kernel_row(kernel, cover))


if __name__ == "__main__":
    main()
