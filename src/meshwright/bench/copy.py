"""Bandwidth of the device's memory, and of the link between device and host.

A copy within device memory counts bytes read plus bytes written; a copy over the host link counts them once.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from meshwright.bench.timing import measure

Row = dict[str, Any]
# Several times the size of any device's cache, so that memory is measured.
MEMORY_BYTES = {"cuda": 1 << 31, "cpu": 1 << 27}
LINK_BYTES = 1 << 28


def copy_rows(device: torch.device, *, seconds: float) -> Iterator[Row]:
    """Copy, write and read in device memory; on a GPU also the host link, pinned and pageable, both ways."""
    yield from memory_rows(device, seconds=seconds)
    if device.type == "cuda":
        yield from link_rows(device, seconds=seconds)


def memory_rows(device: torch.device, *, seconds: float) -> Iterator[Row]:
    """The bandwidth that memory-bound kernels reach."""
    count = MEMORY_BYTES[device.type] // 4
    source, target = torch.randn(count, device=device), torch.empty(count, device=device)
    size = 4.0 * count
    yield _row("copy", 2 * size, lambda: target.copy_(source), device, seconds)
    yield _row("write", size, lambda: target.fill_(1.5), device, seconds)
    yield _row("read", size, lambda: source.sum(), device, seconds)


def link_rows(device: torch.device, *, seconds: float) -> Iterator[Row]:
    """Host to device and device to host; our data loader uses pinned host memory."""
    there = torch.randn(LINK_BYTES // 4, device=device)
    for kind, here in (("pinned", torch.randn(LINK_BYTES // 4).pin_memory()), ("pageable", None)):
        host: Tensor = torch.randn(LINK_BYTES // 4) if here is None else here

        def to_device(source: Tensor = host) -> Tensor:
            return there.copy_(source, non_blocking=True)

        def to_host(target: Tensor = host) -> Tensor:
            return target.copy_(there, non_blocking=True)

        yield _row(f"host to device, {kind}", LINK_BYTES, to_device, device, seconds)
        yield _row(f"device to host, {kind}", LINK_BYTES, to_host, device, seconds)


def _row(
    what: str, num_bytes: float, call: Callable[[], object], device: torch.device, seconds: float
) -> Row:
    timing = measure(call, device, seconds=seconds)
    return {
        "what": what,
        "bytes": num_bytes,
        "seconds": timing.median,
        "spread": timing.spread,
        "gigabytes_per_second": num_bytes / timing.median / 1e9,
    }
